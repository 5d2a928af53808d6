"""How far right results may lie apart: from the dtype, the length of sums, and how many of them follow one another.

A plan only changes the order in which numbers are added. A sum of n rounded products errs by about sqrt(n) * u relative to
its terms [Higham, Mary: A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019], and
errors of d such sums in turn add like a random walk, by sqrt(d). Products accumulate in float32 at least, so with storage in
bfloat16 only what is stored between them is rounded coarsely: once a sum, and once for each rank's part of it.

    bound = sqrt(d) * (SAFETY * sqrt(n) * u_sum + STORED_SAFETY * sqrt(1 + ranks) * u_stored)

The factors cover what the walk does not know: cancellation in the largest element of a tensor, softmax, norms. Right plans
of every shipped family stay five times below the bound in float64 and float32 [measured: tests/sim/test_verification.py].
In bfloat16 they have come to two thirds of it (gradients of query projections, over ten seeds): there only gross mistakes,
of a tenth and more, can be told from rounding.
"""

from __future__ import annotations

import math

import torch
from torch import nn

SAFETY = {torch.float64: 32.0, torch.float32: 8.0, torch.bfloat16: 32.0}
STORED_SAFETY = 4.0
_EDGES = 4.0  # sums of a layer that follow one another, forward; as many again backward, and its norms


def rounding_bound(dtype: torch.dtype, longest_sum: int, depth: int, ranks: int) -> float:
    """The relative error (over a tensor's largest element) below which two runs are equal."""
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
    return rounding_bound(dtype, max([tokens, *widths]), int(layers * 4 * _EDGES) + 2, ranks)
