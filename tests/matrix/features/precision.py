"""Compute and sums in less than float64: as far from float64 as the unsharded model in that dtype."""

from __future__ import annotations

import torch
from torch import nn

from tests.matrix.feature import feature
from tests.matrix.sides import Side

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


@feature(prepare=_single, rounds=torch.bfloat16, without=PLAIN | {"vision"})
def bfloat16_compute(side: Side) -> None:
    _place(side, dtype="bfloat16")
    side.step(0)
    side.clip(1.0)
    side.update()


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
