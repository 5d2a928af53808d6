"""A config of stages with a number of layers each, and heads or a width by stage, scaled down: models of images.

What stays: the number of stages, the heads of each, whether `tp` divides the width of a stage, and how the widths grow where one width says
those of all stages.
"""

from __future__ import annotations

import copy
from itertools import count, islice
from math import gcd
from typing import Any

from parallelize.plan.models.small_images import PATCHES, side_of

_MOST_LAYERS = 2  # of a stage: in models with windows, every second layer shifts them
_HEAD_WIDTH = 6
_WINDOW = 3  # patches along each side
_HEADS, _WIDTHS = "num_heads", "hidden_sizes"


def has_stages(config: Any) -> bool:
    """Whether a config lists the layers of each stage."""
    return isinstance(vars(config).get("depths"), (list, tuple))


def scaled_stages(config: Any, tp: int) -> Any:
    """A config of stages with small sizes, for `tp` ranks."""
    small, fields = copy.deepcopy(config), vars(config)
    small.depths = type(config.depths)(min(depth, _MOST_LAYERS) for depth in config.depths)
    if isinstance(heads := fields.get(_HEADS), (list, tuple)) and type(fields.get("embed_dim")) is int:
        _scale_first_width(small, config, heads[0])
    if isinstance(widths := fields.get(_WIDTHS), (list, tuple)):
        setattr(small, _WIDTHS, type(widths)(_small_widths(widths, tp)))
    _scale_images(small, fields.get("patch_size"), fields.get("image_size"), fields.get("window_size"))
    return small


def _scale_images(small: Any, patch: Any, image: Any, window: Any) -> None:
    """Images of a few patches, or of one window in the last stage, whose sides are half as long after each."""
    if type(patch) is not int or type(image) is not int:
        return
    side = side_of(patch, PATCHES)
    if type(window) is int:
        small.window_size = min(window, _WINDOW)
        side = patch * small.window_size * 2 ** (len(small.depths) - 1)
    small.image_size = min(image, side)


def _scale_first_width(small: Any, real: Any, heads: int) -> None:
    """Narrow heads, from whose width in the first stage all widths follow."""
    small.embed_dim = heads * min(_HEAD_WIDTH, real.embed_dim // heads)
    if type(vars(real).get("hidden_size")) is int:  # of the last stage
        small.hidden_size = real.hidden_size * small.embed_dim // real.embed_dim


def _small_widths(widths: Any, tp: int) -> list[int]:
    """As many different widths: what they have in common with `tp`, times a number of their own that has nothing in common with it."""
    factors = islice((factor for factor in count(3, 2) if gcd(factor, tp) == 1), len(widths))
    return [gcd(width, tp) * factor for width, factor in zip(widths, factors, strict=True)]
