"""Logits in every form: full, sharded over the vocabulary, and deferred until the loss."""
