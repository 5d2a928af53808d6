"""DTensors whose shards no placement of PyTorch describes: packed weights, and key/value heads that several ranks
store."""
