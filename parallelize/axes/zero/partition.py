"""Which gradients are reduced together. Pure arithmetic on sizes, for the reducer and for the analysis that predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

BUCKET_BYTES = 25 * 2**20
"""The default of PyTorch's DistributedDataParallel: large enough for bandwidth, small enough to start early."""


class GradientSize(NamedTuple):
    """One gradient. Only gradients with the same `key` share a bucket. `late`: it is known only when a step ends."""

    key: Any
    bytes: int
    late: bool


def partition(gradients: Sequence[GradientSize], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Yield the indices of `gradients` by bucket, in the order in which backward fills them.

    Backward goes from the last gradient to the first; late gradients come at the end. A bucket is closed once it contains
    `bucket_bytes`.
    """
    for late in (False, True):
        open_buckets: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for index in reversed(range(len(gradients))):
            gradient = gradients[index]
            if gradient.late is not late:
                continue
            if sizes.get(gradient.key, 0) >= bucket_bytes:
                yield open_buckets.pop(gradient.key)
                sizes[gradient.key] = 0
            open_buckets.setdefault(gradient.key, []).append(index)
            sizes[gradient.key] = sizes.get(gradient.key, 0) + gradient.bytes
        yield from open_buckets.values()
