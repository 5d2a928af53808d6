"""Modules that compute otherwise on shards than their own forward does: norms, embeddings, attention, state-space
mixers."""
