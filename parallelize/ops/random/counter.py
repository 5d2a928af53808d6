"""A counter-based random generator: 64 random bits are a function of a key and of an element's global index.

A key is (seed, name, step, ...), hashed once on the host; each element then costs 18 integer ops. There is no state, so
any rank can draw any element, in any order and in blocks of any size, and CPU and CUDA give the same bits.

Quality: the first half is SplitMix64 (a Weyl sequence through Stafford's mix 13), which passes BigCrush as a sequential
generator. Its streams are windows of one sequence of 2^64, so the windows of two keys could overlap; the second half of
the key, added before one more round, makes even overlapping windows different.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; D. Stafford, "Better bit
mixing", 2011; the last multiplier is that of D. Lemire's and P. Evensen's published 64-bit mixers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from parallelize.base.agreement import text_digest


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
    return Key(*struct.unpack("<qq", text_digest(text, 16)))


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
    """Numbers inside (0, 1), as exact float64: (k + 1/2) / 2^52, so that 1 - u is exact as well. `index` is
    overwritten."""
    return _top(bits(stream, index), 52).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _top(z: torch.Tensor, count: int) -> torch.Tensor:
    return z.bitwise_right_shift_(64 - count).bitwise_and_((1 << count) - 1)


def keep_mask(stream: Key, index: torch.Tensor, p: float) -> torch.Tensor:
    """True with probability 1 - p (to within 2^-64), for p < 1. `index` is overwritten.

    The bits as a signed number are uniform, so one comparison does it.
    """
    return bits(stream, index) >= min(round(p * 2**64), 2**64 - 1) - 2**63


class IndexRun(NamedTuple):
    """Consecutive elements: `length` of them, from `local` in a row of the local tensor, from `first` in the full
    tensor."""

    local: int
    first: int
    length: int


class Block(NamedTuple):
    """A block of a tensor seen as [rows, columns]."""

    rows: slice
    columns: slice


def blocks(offsets: torch.Tensor, runs: Iterable[IndexRun]) -> Iterator[tuple[Block, torch.Tensor]]:
    """(block, global indices) of a tensor seen as rows: row i's run starts at offsets[i] + run.first in the full
    tensor.

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


# -- normal ----------------------------------------------------------------------------------------------------------
# The inverse of the normal distribution function, with the same bits everywhere. torch's log, erfinv and cos differ
# in the last bit between the vector body and the scalar tail of a loop, and between CPU and CUDA; so does its square
# root, which MKL does not round correctly [measured: 46 of 3069 on torch 2.13+cpu]. So this file uses only + - * / of
# float64, each in a kernel of its own, which IEEE 754 rounds in the same way on any machine. (No division by a Python
# number: CUDA multiplies by the inverse. No fused multiply-add.) Source: M. J. Wichura, "Algorithm AS 241: the
# percentage points of the normal distribution", Applied Statistics 37, 1988 (PPND16, relative accuracy 1e-16).


_CENTER = (
    (
        2509.0809287301226727,
        33430.575583588128105,
        67265.770927008700853,
        45921.953931549871457,
        13731.693765509461125,
        1971.5909503065514427,
        133.14166789178437745,
        3.387132872796366608,
    ),
    (
        5226.495278852545925,
        28729.085735721942674,
        39307.89580009271061,
        21213.794301586595867,
        5394.1960214247511077,
        687.1870074920579083,
        42.313330701600911252,
        1.0,
    ),
)
_TAIL = (
    (
        7.7454501427834140764e-4,
        0.0227238449892691845833,
        0.24178072517745061177,
        1.27045825245236838258,
        3.64784832476320460504,
        5.7694972214606914055,
        4.6303378461565452959,
        1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9,
        5.475938084995344946e-4,
        0.0151986665636164571966,
        0.14810397642748007459,
        0.68976733498510000455,
        1.6763848301838038494,
        2.05319162663775882187,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        0.0012426609473880784386,
        0.026532189526576123093,
        0.29656057182850489123,
        1.7848265399172913358,
        5.4637849111641143699,
        6.6579046435011037772,
    ),
    (
        2.04426310338993978564e-15,
        1.4215117583164458887e-7,
        1.8463183175100546818e-5,
        7.868691311456132591e-4,
        0.0148753612908506148525,
        0.13692988092273580531,
        0.59983220655588793769,
        1.0,
    ),
)
"""(numerator, denominator) of each range, highest power first. [AS 241, PPND16]"""

_SQRT_HALF = 0.70710678118654752440
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts, the first with zeros at its end, so that its product with an exponent is exact. [fdlibm]"""


def inverse_normal(u: torch.Tensor) -> torch.Tensor:
    """The x such that a standard normal variable is below x with probability u; u is float64 in (0, 1)."""
    q = u - 0.5
    r = (q * q).neg_().add_(0.180625)
    out = _ratio(_CENTER, r).mul_(q)
    outside = (r < 0.0).nonzero(as_tuple=True)  # |q| > 0.425: 15% of the elements
    out[outside] = _tail(u[outside])
    return out


def _tail(u: torch.Tensor) -> torch.Tensor:
    lower = u < 0.5
    r = _root(log(torch.where(lower, u, 1.0 - u)).neg_())
    near = r <= 5.0
    x = torch.where(near, _ratio(_TAIL, r - 1.6), _ratio(_FAR_TAIL, r - 5.0))
    return torch.where(lower, -x, x)


def _root(x: torch.Tensor) -> torch.Tensor:
    """The square root of numbers in [2.5, 40], by Heron's method from a line with a relative error below 0.25."""
    y = (x * _LINE[0]).add_(_LINE[1])
    for _ in range(5):  # errors of 0.25, 0.025, 3e-4, 5e-8, 1e-15, rounding
        y = (x / y).add_(y).mul_(0.5)
    return y


_LINE = (0.16, 1.6)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64 numbers, to about 1 ulp: 2 atanh((m - 1) / (m + 1)) + e ln 2."""
    pattern = x.view(torch.int64)
    exponent = (pattern >> 52) - 1023
    m = ((pattern & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    high = m > 2 * _SQRT_HALF
    m = torch.where(high, m * 0.5, m)
    e = (exponent + high).to(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    series = _horner(_ATANH, s * s).mul_(s)
    return (series + e * _LN2_LOW) + e * _LN2_HIGH


_ATANH = tuple(2.0 / power for power in range(23, 0, -2))
"""2 atanh(s) / s in powers of s^2, highest first; |s| < 0.172, so the first omitted term is below 2e-20."""


def _ratio(polynomials: tuple[Sequence[float], Sequence[float]], r: torch.Tensor) -> torch.Tensor:
    return _horner(polynomials[0], r).div_(_horner(polynomials[1], r))


def _horner(coefficients: Sequence[float], r: torch.Tensor) -> torch.Tensor:
    out = (r * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        out.mul_(r).add_(coefficient)
    return out
