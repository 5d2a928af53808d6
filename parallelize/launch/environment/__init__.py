"""Who started this process, which rank it is, and where the head node is. Torch-free."""
