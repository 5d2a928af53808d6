"""A small model, a saved checkpoint of it, and the slug of an error."""

from __future__ import annotations

import torch
from torch import nn

from parallelize import Checkpointer
from parallelize.base.errors import ParallelizeError


def slug_of(call) -> str:
    try:
        call()
    except ParallelizeError as error:
        return error.slugs[0]
    return ""


def linear(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4, **options))


def saved(root, module, step: int = 1, **options):
    with Checkpointer(root, module, **options) as checkpoints:
        checkpoints.save(step)
