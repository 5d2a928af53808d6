"""The rows of the matrix, by what they are about. Each function runs on both sides."""
