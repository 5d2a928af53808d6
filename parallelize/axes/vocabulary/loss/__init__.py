"""Losses, log-probabilities and entropies of logits that may be sharded or deferred."""
