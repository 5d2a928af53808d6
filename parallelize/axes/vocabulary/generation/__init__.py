"""Generation: the loop of `generate`, and the changes that `generate` of `transformers` needs."""
