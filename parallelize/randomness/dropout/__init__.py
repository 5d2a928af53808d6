"""Dropout with one global mask: call sites, positions in training, and global indices of activations."""
