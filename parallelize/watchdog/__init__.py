"""A thread on every rank that says which rank is missing or different, and what the others were waiting for."""
