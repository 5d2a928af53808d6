"""The bound on the difference of two correct runs: from the dtype, the length of sums, and how many sums follow each other.

A plan only changes the order in which numbers are added. A sum of n rounded products has an error of about sqrt(n) * u
relative to its terms [Higham, Mary: A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5),
2019], and the errors of d consecutive sums add up like a random walk, as sqrt(d). Products are accumulated in float32 at
least. So in bfloat16 only what is stored between sums is rounded coarsely: once for each sum, and once for each rank's part of it.

    bound = sqrt(d) * (SAFETY * sqrt(n) * u_sum + STORED_SAFETY * sqrt(1 + ranks) * u_stored)

The factors cover what this model leaves out: cancellation in the largest element of a tensor, softmax, norms. Correct plans
of every shipped family stay five times below the bound in float64 and float32
[measured: tests/tools/verification/test_verification.py]. In bfloat16 they have reached two thirds of it (gradients of query
projections, over ten seeds), so only mistakes of a tenth and more can be told from rounding.
"""

from __future__ import annotations

import math

import torch
from torch import nn

SAFETY = {torch.float64: 32.0, torch.float32: 8.0, torch.bfloat16: 32.0}
STORED_SAFETY = 4.0
_SUMS_OF_LAYER = 4.0  # consecutive sums in the forward of a layer; backward and norms add as many again


def rounding_bound(dtype: torch.dtype, longest_sum: int, depth: int, ranks: int) -> float:
    """The largest error, relative to a tensor's largest element, at which two runs are equal.

    longest_sum, depth: n and d above.
    """
    stored = torch.finfo(dtype).eps / 2
    summed = min(stored, torch.finfo(torch.float32).eps / 2)
    bound = SAFETY.get(dtype, 32.0) * math.sqrt(longest_sum) * summed
    if dtype.itemsize < 4:
        bound += STORED_SAFETY * math.sqrt(1 + ranks) * stored
    return math.sqrt(depth) * bound


def bound_of(model: nn.Module, dtype: torch.dtype, tokens: int, ranks: int) -> float:
    """The bound for one training step of a model on `tokens` tokens."""
    widths = [size for parameter in model.parameters() if parameter.ndim > 1 for size in parameter.shape]
    layers = max([1, *(len(inner) for inner in model.modules() if isinstance(inner, nn.ModuleList))])
    return rounding_bound(dtype, max([tokens, *widths]), int(layers * 4 * _SUMS_OF_LAYER) + 2, ranks)
