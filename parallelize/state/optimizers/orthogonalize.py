"""The orthogonalization of Muon: Newton-Schulz iterations in bfloat16, operation by operation those of `torch.optim.Muon`.

Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"; "Muon is Scalable for LLM Training",
arXiv:2502.16982, for the learning rate that matches AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

T = torch.Tensor
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, chosen for its slope at zero."""
LEARNING_RATES = ("original", "match_rms_adamw")


def orthogonalized(matrix: T, coefficients: Sequence[float], num_steps: int, eps: float) -> T:
    """[m, n] -> [m, n] in bfloat16: about U V^T of the singular value decomposition U S V^T.

    Args:
        matrix: in bfloat16; it is not changed.
        coefficients: of the polynomial. num_steps: iterations of it.
        eps: the smallest norm by which the matrix is divided.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x.div(x.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted_lr(lr: float, adjust: str | None, shape: Sequence[int]) -> float:
    """The learning rate of a matrix of this shape. adjust: one of `LEARNING_RATES`; None: "original"."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


def flops_of(shape: Sequence[int], num_steps: int) -> int:
    """Of the orthogonalization of a matrix: its cost, by which matrices are divided among ranks."""
    short, long = sorted(shape)
    return num_steps * (4 * short * short * long + 2 * short**3)
