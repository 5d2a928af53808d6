"""Recompute: which units are recomputed, what they save, and how they run."""
