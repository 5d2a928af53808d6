"""Tiny models of a class, built from it and a small config, so that nothing of a live model is read.

The live model may be sharded, on another device, or of other ranks' layers. Its class and config are the same on every
rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from parallelize.plan.models.miniature.attempts import small_versions
from parallelize.plan.models.miniature.rules import Rules

_MOST_PARAMETERS = 50_000_000
_SEED = 1


def tiny_copies(cls: type[nn.Module], config: Any) -> Iterator[nn.Module]:
    """Tiny models of a class, in evaluation mode, whose weights are random: those of each small config that the class
    accepts.

    Cost: tens of milliseconds each. Torch's generator is drawn from.
    """
    for small in small_versions(config, Rules()):
        with suppress(Exception):  # a class may refuse sizes with any error
            yield _built(cls, small)


def _built(cls: Callable[[Any], nn.Module], small: Any) -> nn.Module:
    small._attn_implementation = "eager"  # the config of a live model may name one that needs an accelerator, or a mesh
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in cls(copy.deepcopy(small)).parameters())
    if elements > _MOST_PARAMETERS:
        raise ValueError(f"{elements} parameters")
    with torch.device("cpu"):
        model = cls(small).float().eval()
    _draw(model)
    return model


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Weights whose outputs are of the size of their inputs, so that logits differ: those of a new model are almost
    equal."""
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            fan_in = parameter[0].numel()
            parameter.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator)
