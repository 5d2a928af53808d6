"""Drawing tokens from sharded logits: filters, probability mass, noise, and the draw itself."""
