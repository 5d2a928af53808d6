"""Whole experts of a mixture on each rank of `tp`: the style `experts` with `ep`.

Every rank has all tokens and choices of the group, as in `split_experts.py`, and computes the choices of its own experts:

    tokens [N, hidden], choices [N, k], weights [N, k] -> pairs of a token and one expert of this rank
    stock forward of the pairs (k = 1) -> [pairs, hidden] -> added up by token: a term of the output, summed over ranks

What is sent is the same as where each expert is split. The matmuls are larger, and ranks wait for the one whose experts got the most
tokens. Source: Lepikhin et al., GShard, arXiv:2006.16668 (experts divided over ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.tensor.planned_forward import Conversion, on_local_parameters
from parallelize.tensor.split_experts import converted_inputs, input_names

T = torch.Tensor


def whole_experts(module: nn.Module, experts: tuple[int, int], num_ranks: int, convert_choices: Conversion) -> Callable:
    """A forward with the arguments and results of the stock one.

    Args:
        experts: [start, stop) of this rank's experts.
        convert_choices: the input conversion of choices and weights; that of tokens and of the output are the module's own.
    """
    names = input_names(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> T:
        planned = self._applied.planned
        tokens, choices, weights = converted_inputs(planned, convert_choices, names, args, kwargs)
        rows, slots = _pairs(choices, experts, num_ranks)
        local = choices[rows, slots].sub(experts[0]).clamp(0, experts[1] - experts[0] - 1)
        weight = weights[rows, slots]
        if not len(rows):  # one pair that counts nothing, so that parameters and tokens get gradients of zeros
            rows, local, weight = rows.new_zeros(1), local.new_zeros(1), weights[:1, 0] * 0
        inputs = tokens.index_select(0, rows), local[:, None], weight[:, None]
        out = on_local_parameters(self, planned, inputs, {})
        return planned.leave(torch.zeros_like(tokens).index_add(0, rows, out))

    return forward


def _pairs(choices: T, experts: tuple[int, int], num_ranks: int) -> tuple[T, T]:
    """(token, slot) of each choice of this rank's experts, by token. On tensors without values, an even share."""
    if choices.is_meta:
        pairs = torch.arange(-(-choices.numel() // num_ranks), device=choices.device)
        return pairs % len(choices), pairs % choices.shape[1]
    is_local = (choices >= experts[0]) & (choices < experts[1])
    rows, slots = is_local.nonzero(as_tuple=True)
    return rows, slots
