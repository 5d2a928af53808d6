"""Weights of frozen linears in 4 or 8 bits, and what computes with them."""
