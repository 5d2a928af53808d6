"""Initialization of parameters: recordings of initializers, distributions, and drawing into shards."""
