"""What a training step costs: messages, memory and time, computed from recorded microbatches."""
