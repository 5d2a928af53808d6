"""What ranks run in the tests of faults of mixtures with `ep`: a step in which one rank's router is wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from tests.support.models import tiny_batch, tiny_model

AXES = {"dp": {"dp": 2}, "tp": {"tp": 2}}


def changed(output: tuple, change: str) -> tuple:
    """The logits, weights and choices of a router, of which something is wrong."""
    logits, weights, choices = output
    if change == "choices":  # another number of them
        return logits, torch.cat([weights, weights], 1), torch.cat([choices, choices], 1)
    if change == "dtype":
        return logits, weights.float(), choices
    if change == "nan":
        return logits * torch.nan, weights * torch.nan, choices
    raise AssertionError(change)


def break_router(model: nn.Module, change: str) -> None:
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: changed(output, change))


def faulty_step(rank: int, axis: str, change: str, model: nn.Module | None = None, **options: Any) -> str:
    """The loss of a step as text, or its error. The last rank's router in the second layer is changed."""
    local = copy.deepcopy(model) if model is not None else tiny_model("mixtral", torch.float64)
    parallel = parallelize_model(local, build_mesh("cpu", **AXES[axis]), ep=2, check_replicated=False, **options)
    if rank == 1:
        break_router(local, change)
    ids, labels = tiny_batch(batch=2, length=8)
    rows = slice(rank, rank + 1) if axis == "dp" else slice(0, 2)
    try:
        return str(float(parallel.step(ids[rows], targets=labels[rows])))
    except Exception as error:
        return str(error)
