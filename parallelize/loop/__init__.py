"""What a training loop uses besides the step: batches, accumulation, clipping, local optimizer steps, metrics."""
