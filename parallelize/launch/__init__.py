"""`parallelize run`: a training recipe from a file, on whatever started the processes."""
