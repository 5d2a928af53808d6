"""`verify`: compare a training step on a mesh with the unsharded model, and name the module that causes a
difference."""
