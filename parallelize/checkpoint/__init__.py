"""Checkpoints: saving and loading training state and weights, with any mesh on either side."""
