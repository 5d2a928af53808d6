"""What a planned model refuses: each guard in its file, all of them in tables (`guard_table`), by the moment at which
they are set up."""
