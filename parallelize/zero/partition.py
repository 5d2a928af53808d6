"""Which gradients are sent together: pure arithmetic on sizes, for the reducer and for whoever foretells what it sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

BUCKET_BYTES = 25 * 2**20
"""As PyTorch's DistributedDataParallel has it: large enough for bandwidth, small enough to begin early."""


class Piece(NamedTuple):
    """One gradient. Only those of one `key` share a bucket. `late`: it is known only when a step ends."""

    key: Any
    bytes: int
    late: bool


def partition(pieces: Sequence[Piece], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Places in `pieces` by bucket, in the order in which backward fills them: from the last to the first, late ones at the
    end. A bucket takes no more once it holds `bucket_bytes`."""
    for late in (False, True):
        open_: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for place in reversed(range(len(pieces))):
            piece = pieces[place]
            if piece.late is not late:
                continue
            if sizes.get(piece.key, 0) >= bucket_bytes:
                yield open_.pop(piece.key)
                sizes[piece.key] = 0
            open_.setdefault(piece.key, []).append(place)
            sizes[piece.key] = sizes.get(piece.key, 0) + piece.bytes
        yield from open_.values()
