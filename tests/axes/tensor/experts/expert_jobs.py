"""What ranks run in the tests of faults of mixtures with `ep`: a step in which one rank's router is wrong."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from tests.support.models import tiny_batch, tiny_model

AXES = {"dp": {"dp": 2}, "tp": {"tp": 2}}
FOUR = {"dp=4": {"dp": 4}, "dp=2, tp=2": {"dp": 2, "tp": 2}}


def changed(output: tuple, change: str) -> tuple:
    """The logits, weights and choices of a router, of which something is wrong."""
    logits, weights, choices = output
    if change == "choices":  # another number of them
        return logits, torch.cat([weights, weights], 1), torch.cat([choices, choices], 1)
    if change == "dtype":
        return logits, weights.float(), choices
    if change == "range":
        choices = choices.clone()
        choices[-1, 0] = 17
        return logits, weights, choices
    if change == "nan":
        return logits * torch.nan, weights * torch.nan, choices
    raise AssertionError(change)


def break_router(model: nn.Module, change: str) -> None:
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: changed(output, change))


def faulty_step(rank: int, axis: str, change: str, model: nn.Module | None = None, **options: Any) -> str:
    """The loss of a step as text, or its error. The last rank's router in the second layer is changed; or its batch is
    empty."""
    axes = (AXES | FOUR)[axis]
    ranks, samples = prod(axes.values()), axes.get("dp", 1)
    local = copy.deepcopy(model) if model is not None else tiny_model("mixtral", torch.float64)
    options = {"ep": ranks, "check_replicated": change == "empty", **options}
    parallel = parallelize_model(local, build_mesh("cpu", **axes), **options)
    if rank == ranks - 1 and change != "empty":
        break_router(local, change)
    ids, labels = (x.chunk(samples)[rank * samples // ranks] for x in tiny_batch(batch=ranks, length=8))
    if rank == ranks - 1 and change == "empty":
        ids, labels = ids[:0], labels[:0]
    try:
        return str(float(parallel.step(ids, targets=labels)))
    except Exception as error:
        return str(error)
