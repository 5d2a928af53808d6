"""The inverse of the normal distribution function, with the same bits everywhere.

torch's log, erfinv and cos differ in the last bit between the vector body and the scalar tail of a loop, and between CPU
and CUDA; so does its square root, which MKL does not round correctly [measured: 46 of 3069 on torch 2.13+cpu]. So this file
uses only + - * / of float64, each in a kernel of its own, which IEEE 754 rounds in the same way on any machine. (No division by a
Python number: CUDA multiplies by the inverse. No fused multiply-add.)

Source: M. J. Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37, 1988
(PPND16, relative accuracy 1e-16).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
