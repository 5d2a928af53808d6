"""Compute and sums in less than float64: as far from float64 as the unsharded model in that dtype."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from parallelize.plan.models.float8_linears import as_plain_linears
from tests.matrix.feature import at, feature
from tests.matrix.sides import Side
from tests.state.quantization.float8_linears import Float8Linear

PLAIN = {"experts", "recurrent"}
"""A router that rounds chooses other experts, and a scan adds its rounding up."""


def _single(model: nn.Module) -> nn.Module:
    return model.float()


def _place(side: Side, **options: str) -> None:
    """The reference has the same weights, and computes in float64."""
    if side.alone:
        side.model.double()
    side.place(**options)


@feature(prepare=_single, rounds=torch.float32, without=PLAIN | {"vision"})
def float32_weights(side: Side) -> None:
    _place(side)
    side.train()


@feature(prepare=nn.Module.bfloat16, rounds=torch.bfloat16, without=PLAIN | {"vision"})
def bfloat16_weights(side: Side) -> None:
    _place(side)
    side.step(0)


@at(
    "placed",
    prepare=_single,
    turn=2,
    options={"dtype": "bfloat16"},
    rounds=torch.bfloat16,
    without=PLAIN | {"vision"},
    apart={"dtype"},
    refused_with={"*_after": {"added-parameter": "ZeRO 3 casts what it gathers, and has later adapters in full"}},
)
def bfloat16_compute(side: Side) -> None:
    if side.alone:
        side.model.double()


@feature(prepare=_single, rounds=torch.bfloat16, without=PLAIN | {"vision"})
def bfloat16_sums(side: Side) -> None:
    _place(side, dtype="bfloat16", reduce_dtype="bfloat16")
    side.step(0)
    side.update()


@feature(prepare=_single, rounds=torch.bfloat16, without=PLAIN | {"vision"})
def bfloat16_recomputed(side: Side) -> None:
    _place(side, dtype="bfloat16", recompute="full")
    side.optimizer(torch.optim.AdamW, eps=1e-2)
    side.step(0)
    side.update()


@feature(prepare=_single, rounds=torch.bfloat16, without=PLAIN | {"vision"}, on=lambda axis: axis.ranks("tp") > 1)
def bfloat16_overlap(side: Side) -> None:
    _place(side, dtype="bfloat16", overlap="chunked")
    side.step(0)
    side.update()


def _in_float8(model: nn.Module) -> nn.Module:
    """Its linears, but the head, as torchao converts them: their matmuls round, their weights do not."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith("head"):
            module.__class__ = Float8Linear
            module.config = SimpleNamespace(emulate=True)
    return model


@feature(prepare=_in_float8, rounds=torch.float8_e4m3fn, without=PLAIN | {"vision"})
def float8_linears(side: Side) -> None:
    """The reference computes without float8."""
    if side.alone:
        as_plain_linears(side.model)
    side.place()
    side.train()
