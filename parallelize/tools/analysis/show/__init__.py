"""An explanation as text and as an HTML page: figures, tables and SVG pictures."""
