"""Tensor parallelism at run time: installs a resolved plan in a model, with overlap of collectives and matmuls."""
