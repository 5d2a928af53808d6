"""PyTorch's tensor-parallel styles, with the same names, arguments and meaning, as rules of a plan where one means the
same.

A dict written for `torch.distributed.tensor.parallel.parallelize_module` runs unchanged. Parameters become DTensors.
Activations are plain local tensors; DTensor inputs, and DTensor outputs (`use_local_output=False`), are supported with
autograd. A style without a rule is applied by PyTorch's own class. Applying a style object does not change it.

Backward: the input gradient of a column style is one term of a sum over ranks, so it is all-reduced (Replicate input)
or reduce-scattered (Shard input). The input gradient of a row style is complete.
"""
