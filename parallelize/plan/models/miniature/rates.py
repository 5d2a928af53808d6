"""Rates of dropout set to zero, in a config or in modules: what is compared or checked is to be the same at each
call."""

from __future__ import annotations

from typing import Any

from torch import nn


def without_dropout(config: Any) -> None:
    """Set dropout rates in the config to zero, and those of layers and paths that are left out at random."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and _is_rate(name):
            setattr(config, name, 0.0)
        elif name in _AUGMENTATIONS:
            setattr(config, name, None)


def disable_dropout(model: nn.Module) -> None:
    """Set dropout rates of modules to zero, and those of layers and paths that are left out at random."""
    for module in model.modules():
        if any(word in type(module).__name__ for word in ("Dropout", "StochasticDepth")) and isinstance(
            vars(module).get("p"), float
        ):
            setattr(module, "p", 0.0)  # noqa: B010 - mypy: not every module has `p`
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _is_rate(name):
                setattr(module, name, 0.0)


_AUGMENTATIONS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Fields of how far positions are moved at random in training; None: not at all."""

_RATES = (
    "dropout",
    "drop_path",
    "drop_prob",
    "drop_rate",
    "layerdrop",
    "layer_drop",
    "mask_time_prob",
    "mask_feature_prob",
)


def _is_rate(name: str) -> bool:
    return any(rate in name for rate in _RATES) or name.endswith("pdrop")
