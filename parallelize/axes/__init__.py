"""A planned model over each axis of the mesh: tp, data axes, cp, pp; its activations, its batches, and the end of a
language model."""
