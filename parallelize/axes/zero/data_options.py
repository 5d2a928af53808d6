"""What `shard_data` needs besides the stage: of the options of a run, those of the data axes, with torch dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallelize.axes.zero.partition import BUCKET_BYTES
from parallelize.plan.options import Options


@dataclass(frozen=True)
class DataOptions:
    """Arguments of `shard_data`, which describes them."""

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    defer: bool = False
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True

    @classmethod
    def of(cls, options: Options, bucket_bytes: int = BUCKET_BYTES, reshard_after_forward: bool = True) -> DataOptions:
        """Those of a run. Buckets and resharding are chosen by `shard_data` alone."""
        names = options.dtype, options.reduce_dtype
        dtype, reduce_dtype = (None if name is None else getattr(torch, name) for name in names)
        return cls(dtype, reduce_dtype, options.defer, bucket_bytes, reshard_after_forward)

    @property
    def low_precision(self) -> bool:
        """Whether compute is narrower than the values that the optimizer steps."""
        return self.dtype is not None and self.dtype.itemsize < 4

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Only narrow dtypes are cast to: parameters are stored in any other."""
        sum_dtype = self.reduce_dtype or (torch.float32 if self.low_precision else None)
        return MixedPrecisionPolicy(self.dtype if self.low_precision else None, sum_dtype, cast_forward_inputs=False)
