"""A function of tensors, recorded: what became of the dims of its operands, as text.

    recorded(lambda x: x.view(2, 5, 2, 3).transpose(1, 2), "b=2 t=5 h=6").out     # "b h0 t h1"

A dim that was divided is named by its factors, `h0` and `h1`; one of size 1 is `-`; one about which nothing is known is
`new`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.dims.factors import Factor, leaves
from parallelize.plan.dims.record import Dims, Record
from parallelize.plan.dims.trace import record_forward

T = torch.Tensor


class Function(nn.Module):
    """A function of the inputs and of parameters that come first."""

    def __init__(self, function: Callable, weights: list[T]):
        super().__init__()
        self.function, self.results = function, []
        self.weights = nn.ParameterList(weights)

    def forward(self, *inputs: T) -> Any:
        self.inputs, out = inputs, self.function(*self.weights, *inputs)
        self.results = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, T)]
        return out


@dataclass
class Recorded:
    """What was recorded.

    Attributes:
        out: the dims of the results. operands: those of the operands, afterwards.
        needed: the dims that an operation needs in full.
        record: all of it.
    """

    out: str
    operands: str
    needed: str
    record: Record


def recorded(function: Callable, *operands: str | T, weights: int = 0) -> Recorded:
    """Record a function.

    Args:
        operands: the names and sizes of the dims of each, such as "b=2 t=5"; or a tensor, whose dims are named x0, x1,
            ...
        weights: so many of the operands, the first ones, are parameters.
    """
    tensors, names = zip(*map(_tensor, operands, range(len(operands))), strict=True)
    model = Function(function, list(tensors[:weights]))
    record = record_forward(model, tuple(tensors[weights:]))
    dims = [record.dims(tensor) for tensor in (*model.weights, *model.inputs)]
    known: dict[Factor, str] = {}
    for operand, words in zip(dims, names, strict=True):
        for dim, word in zip(operand, words, strict=True):
            flat = leaves(dim)
            for index, factor in enumerate(flat):
                known.setdefault(factor, f"{word}{index}" if len(flat) > 1 else word)
    results = [record.dims(result) for result in model.results]
    mixed = {known.get(factor, "new") for mix in record.mixes for factor in leaves(mix.dim)}
    return Recorded(
        " | ".join(_text(result, known) for result in results),
        " | ".join(_text(operand, known) for operand in dims),
        " ".join(sorted(mixed)),
        record,
    )


def _tensor(operand: str | T, index: int) -> tuple[T, list[str]]:
    if isinstance(operand, T):
        return operand, [f"{'xyzuvw'[index]}{dim}" for dim in range(operand.ndim)]
    words = [word.partition("=") for word in operand.split()]
    return torch.randn([int(size) for _, _, size in words]), [name for name, _, _ in words]


def _text(dims: Dims, known: dict[Factor, str]) -> str:
    return " ".join("*".join(known.get(factor, "new") for factor in leaves(dim)) or "-" for dim in dims)
