"""A config made small: one table of what its fields say, and one function that chooses small sizes by it."""
