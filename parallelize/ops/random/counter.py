"""A counter-based random generator: 64 random bits are a function of a key and of an element's global index.

A key is (seed, name, step, ...), hashed once on the host; each element then costs 18 integer ops. There is no state, so any rank
can draw any element, in any order and in blocks of any size, and CPU and CUDA give the same bits.

Quality: the first half is SplitMix64 (a Weyl sequence through Stafford's mix 13), which passes BigCrush as a sequential
generator. Its streams are windows of one sequence of 2^64, so the windows of two keys could overlap; the second half of the key,
added before one more round, makes even overlapping windows different.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; D. Stafford, "Better bit
mixing", 2011; the last multiplier is that of D. Lemire's and P. Evensen's published 64-bit mixers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch


class Key(NamedTuple):
    """A key of 128 bits, as two signed 64-bit numbers."""

    start: int
    late: int


class KeyTensors(NamedTuple):
    """A key as two tensors [] of int64 on the device of the indices, for CUDA graphs, in which a number is constant."""

    start: torch.Tensor
    late: torch.Tensor


AnyKey = Key | KeyTensors


def key(seed: int, name: str, *numbers: int) -> Key:
    """The key of a seed, a name, and any numbers (a step, a call). Stable over processes and versions."""
    text = "\0".join(map(str, (seed, name, *numbers)))
    return Key(*struct.unpack("<qq", hashlib.blake2b(text.encode(), digest_size=16).digest()))


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_WEYL = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(0xD6E8FEB86659FD93))


def bits(stream: AnyKey, index: torch.Tensor) -> torch.Tensor:
    """64 random bits for each index (int64, any shape), as int64. `index` is overwritten and returned.

    Shifts are logical: torch's are arithmetic, so the copies of the sign bit are masked.
    """
    z, t = index, torch.empty_like(index)
    z.mul_(_WEYL).add_(stream.start)
    _fold(z, t, 30).mul_(_MIX[0])
    _fold(z, t, 27).mul_(_MIX[1])
    _fold(z, t, 31).add_(stream.late)
    _fold(z, t, 32).mul_(_MIX[2])
    return _fold(z, t, 32)


def _fold(z: torch.Tensor, t: torch.Tensor, shift: int) -> torch.Tensor:
    """z ^= z >> shift, with zeros shifted in."""
    torch.bitwise_right_shift(z, shift, out=t)
    return z.bitwise_xor_(t.bitwise_and_((1 << (64 - shift)) - 1))


def uniform(stream: Key, index: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers in [0, 1) with 53 random bits in float64, 24 in any other dtype. `index` is overwritten."""
    exact = dtype == torch.float64
    count = 53 if exact else 24
    top = _top(bits(stream, index), count)
    return top.to(dtype if exact else torch.float32).mul_(2.0**-count).to(dtype)


def open_uniform(stream: AnyKey, index: torch.Tensor) -> torch.Tensor:
    """Numbers inside (0, 1), as exact float64: (k + 1/2) / 2^52, so that 1 - u is exact as well. `index` is overwritten."""
    return _top(bits(stream, index), 52).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _top(z: torch.Tensor, count: int) -> torch.Tensor:
    return z.bitwise_right_shift_(64 - count).bitwise_and_((1 << count) - 1)


def keep_mask(stream: Key, index: torch.Tensor, p: float) -> torch.Tensor:
    """True with probability 1 - p (to within 2^-64), for p < 1. `index` is overwritten.

    The bits as a signed number are uniform, so one comparison does it.
    """
    return bits(stream, index) >= min(round(p * 2**64), 2**64 - 1) - 2**63


class IndexRun(NamedTuple):
    """Consecutive elements: `length` of them, from `local` in a row of the local tensor, from `first` in the full tensor."""

    local: int
    first: int
    length: int


class Block(NamedTuple):
    """A block of a tensor seen as [rows, columns]."""

    rows: slice
    columns: slice


def blocks(offsets: torch.Tensor, runs: Iterable[IndexRun]) -> Iterator[tuple[Block, torch.Tensor]]:
    """(block, global indices) of a tensor seen as rows: row i's run starts at offsets[i] + run.first in the full tensor.

    Blocks are small, so that temporaries take a bounded amount of memory; their size does not change the numbers.
    """
    size = block_size(offsets.device)
    for run in runs:
        width = max(min(run.length, size), 1)
        height = max(size // width, 1)
        for row in range(0, len(offsets), height):
            first = offsets[row : row + height, None]
            for column in range(0, run.length, width):
                start, stop = column, min(column + width, run.length)
                columns = torch.arange(run.first + start, run.first + stop, device=offsets.device)
                block = Block(slice(row, row + height), slice(run.local + start, run.local + stop))
                yield block, first + columns


def block_size(device: torch.device) -> int:
    """Elements per block, so that temporaries stay in a core's cache, or fill a GPU."""
    return 1 << 22 if device.type != "cpu" else (1 << 16) * min(torch.get_num_threads(), 16)
