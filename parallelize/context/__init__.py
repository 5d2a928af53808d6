"""Context parallelism: each rank of `cp` holds rows of every sequence, and attention reaches the others'."""
