"""The end of a language model: logits, losses, sampling and generation, sharded over the vocabulary or deferred."""
