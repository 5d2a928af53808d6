"""What the text and the page of an explanation share: words for figures, tables as rows, and SVG pictures."""
