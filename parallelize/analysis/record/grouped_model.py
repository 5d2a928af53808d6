"""The grouped matmul of experts that is modeled: every expert gets as many tokens as any other.

Which experts tokens choose is a matter of values, which meta tensors do not have. So the tokens are divided evenly, and a batched
matmul has the work, results and gradients of the grouped one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor
GROUPED = "grouped_mm"


def grouped_matmul(x: T, weights: T, offs: T | None = None, bias: T | None = None, out_dtype: Any = None) -> T:
    """As `torch._grouped_mm` of tokens [N, in], sorted by expert, and weights [experts, in, out]: [N, out]."""
    experts, tokens = weights.shape[0], len(x)
    missing = -tokens % experts
    groups = (F.pad(x, (0, 0, 0, missing)) if missing else x).view(experts, -1, x.shape[-1])
    return groups.bmm(weights).flatten(0, 1)[:tokens]


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Within the block, experts of `transformers` run as grouped matmuls: their other forwards loop over the values of choices."""
    key = "_experts_implementation"
    configs = {id(config): config for module in model.modules() if (config := _config_of(module)) is not None}
    before = [(config, getattr(config, key)) for config in configs.values()]
    for config, _ in before:
        setattr(config, key, GROUPED)
    try:
        yield
    finally:
        for config, value in before:
            setattr(config, key, value)


def _config_of(module: nn.Module) -> Any:
    """The config by which stacked experts choose what they run; None for any other module."""
    config = vars(module).get("config")
    return config if "is_transposed" in vars(module) and hasattr(config, "_experts_implementation") else None
