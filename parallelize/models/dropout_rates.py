"""Fields of configs that say what is left out, or moved, at random in training."""

from __future__ import annotations

from typing import Any

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


def is_rate(name: str) -> bool:
    """Whether a field, or an attribute of a module, is a rate of what is left out at random."""
    return any(rate in name for rate in _RATES) or name.endswith("pdrop")


def without_dropout(config: Any) -> None:
    """Set dropout rates in the config to zero, and those of layers and paths that are left out at random."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and is_rate(name):
            setattr(config, name, 0.0)
        elif name in _AUGMENTATIONS:
            setattr(config, name, None)
