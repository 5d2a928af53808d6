"""What a training loop uses besides the step: accumulation, clipping, local optimizer steps, metrics."""
