"""What one microbatch does, recorded by running the training code on tensors without values."""
