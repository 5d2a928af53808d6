"""Optimizers that need full matrices, and what serves optimizers of any class."""
