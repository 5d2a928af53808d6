"""PyTorch's styles by their own names, arguments and meaning, on the hot path of this package.

A dict written for `torch.distributed.tensor.parallel.parallelize_module` runs unchanged. Parameters become DTensors;
plain inputs stay plain local tensors inside; where a DTensor comes in, or is asked for (`use_local_output=False`), one is
handled, with autograd. Style objects are never changed by being applied.

Backward, for a column style: each rank's input gradient is a part of the sum, so it is all-reduced (Replicate input) or
reduce-scattered (Shard input). For a row style the input gradient is whole.
"""
