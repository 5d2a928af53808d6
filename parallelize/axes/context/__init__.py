"""Context parallelism: each rank of `cp` computes a part of every sequence, and attention reaches all of it."""
