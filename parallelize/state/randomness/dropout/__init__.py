"""Dropout with one global mask, and what else a forward draws: call sites, positions in training, and global indices of
activations."""
