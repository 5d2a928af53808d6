"""A linear that computes in float8 as torchao's does, with a scale for each tensor, and what it is on shards, by one
process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

T = torch.Tensor


def _rounded(x: T, dtype: torch.dtype = torch.float8_e4m3fn) -> T:
    """The values of a tensor in float8, scaled so that the largest is the largest of the dtype."""
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, weight: T) -> T:
        ctx.save_for_backward(x, weight)
        return _rounded(x) @ _rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: T):
        x, weight = ctx.saved_tensors
        grad = _rounded(grad.reshape(-1, grad.shape[-1]), torch.float8_e5m2)
        of_x = (grad @ _rounded(weight)).view(x.shape)
        return of_x, grad.t() @ _rounded(x.reshape(-1, x.shape[-1]))


class Float8Linear(nn.Linear):
    """A stand-in: torchao's is recognized by the name of its class, and of the module that has it."""

    config: Any = None

    def forward(self, input: T) -> T:
        out = _Float8Matmul.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


def in_float8(model: nn.Module, make: Callable[[nn.Linear], nn.Linear] | None = None) -> nn.Module:
    """The model with its linears in layers converted in place, as `convert_to_float8_training` does."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".layers." in f".{name}.":
            if make is None:
                module.__class__ = Float8Linear
            else:
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, make(module))
    return model


class OnShards(nn.Module):
    """A float8 linear as `ranks` ranks compute it, each with a scale of its own: rows of the weight, or columns."""

    def __init__(self, linear: nn.Linear, ranks: int, is_row: bool):
        super().__init__()
        self.whole, self.ranks, self.is_row = linear, ranks, is_row

    def forward(self, x: T) -> T:
        shard = copy.copy(self.whole)  # of the same class and config
        shard._parameters = dict(self.whole._parameters, bias=None)
        parts = []
        for rank, weight in enumerate(self.whole.weight.chunk(self.ranks, int(self.is_row))):
            shard.__dict__["weight"] = weight
            parts.append(type(self.whole).forward(shard, x.chunk(self.ranks, -1)[rank] if self.is_row else x))
        out = sum(parts[1:], parts[0]) if self.is_row else torch.cat(parts, -1)
        return out if self.whole.bias is None else out + self.whole.bias


def on_shards(model: nn.Module, ranks: int, rows: tuple[str, ...]) -> nn.Module:
    """A copy of a model in float8 that computes as its shards do. rows: names of row linears."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Float8Linear":
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, OnShards(module, ranks, key in rows))
    return model
