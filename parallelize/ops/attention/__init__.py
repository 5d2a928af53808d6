"""Ring attention: tiles, kernels, and the messages of the ring."""
