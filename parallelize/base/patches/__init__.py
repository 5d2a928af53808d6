"""What this package changes in other libraries: every row in `table`, and what is changed now in `active`."""
