"""Saving and resuming a training run on any mesh: `Checkpointer`, `load_checkpoint` and `rebuild`."""
