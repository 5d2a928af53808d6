"""Weights of ranks: numbers that add up to 0 over the ranks that are compared, modulo 2^64.

Each rank adds a digest times its weight to a sum over the mesh. Equal digests vanish, in any number of groups of ranks at once.
All weights but the last are odd, so that no difference of one rank vanishes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from parallelize.base.mesh import MeshSpec


def weight_of(spec: MeshSpec, index: int, shared: Sequence[str]) -> int:
    """The weight of the rank at this index, among the ranks that have its coordinates on the axes `shared`."""
    across = [axis for axis in spec.names if axis not in shared]
    ranks = sorted(spec.group_of(index, *across)) if across else [index]
    return weight_in(ranks, index)


def weight_in(ranks: Sequence[int], rank: int) -> int:
    """The weight of one of these ranks: odd, or for the last one what makes the sum 0."""
    if rank != ranks[-1]:
        return _odd(rank)
    return signed(-sum(_odd(other) for other in ranks[:-1]))


def _odd(rank: int) -> int:
    return signed(text_digest(f"rank {rank}") | 1)


def text_digest(text: str) -> int:
    """A digest of a text, below 2^64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signed(value: int) -> int:
    """The same number modulo 2^64, as int64 stores it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
