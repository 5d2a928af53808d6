"""A config of several parts, such as a text and a tower of images, with each part scaled down, and what the parts have
in common.

What stays, beside what `scale.py` says of a part: the width of what a tower returns is that of the text that reads it,
and tokens that stand for images are in the vocabulary, also where a default config says otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

from parallelize.plan.models.proportional_config import keep_layer_indexes
from parallelize.tools.verification.scale import scaled

_OUTPUTS = ("out_hidden_size", "output_dim")
_ROTATED = 16  # channels of a head whose positions along two sides are rotated: pairs for each side
_PATCH = 4  # pixels along each side
_OF_PATCHES = "spatial_merge_size"
_LAYER = "vision_feature_layer"
_SECTIONS = "mrope_section"


def part_names(config: Any) -> list[str]:
    """The fields of a config of `transformers` that are configs of a text and of what else its model reads; none of
    others."""
    names = [name for name in getattr(config, "sub_configs", None) or {} if hasattr(vars(config).get(name), "to_dict")]
    return names if "text_config" in names and len(names) > 1 else []


def scaled_parts(config: Any, tp: int, stages: int = 1, even: bool = False, ep: int = 1, etp: int = 1) -> Any:
    """A config of several parts with small asymmetric sizes. For the arguments see `scaled`, which does this for the
    text."""
    small = copy.deepcopy(config)
    small.text_config = _text(config.text_config, tp, stages, even=even, ep=ep, etp=etp)
    for name in part_names(config):
        if name != "text_config":
            setattr(small, name, _tower(getattr(config, name), tp, small.text_config.hidden_size))
    _match_projections(small, config)
    _keep_feature_layers(small)
    set_tokens(small, small.text_config.vocab_size)
    return small


def _text(config: Any, tp: int, stages: int, **sizes: Any) -> Any:
    """The small text. Where its positions are those of time, height and width, heads say which channels are whose, as a
    default need not."""
    text, rope = copy.deepcopy(config), vars(config).get("rope_parameters")
    if _SECTIONS in getattr(type(config), "ignore_keys_at_rope_validation", ()) and isinstance(rope, dict):
        text.rope_parameters = {_SECTIONS: [], **rope}
    return scaled(text, tp, stages, **sizes)


def set_tokens(config: Any, vocabulary: int) -> None:
    """Tokens that stand for images and the like, which a small vocabulary does not have: its last ones."""
    free = iter(range(vocabulary - 1, vocabulary // 2, -1))
    for name, value in list(vars(config).items()):
        if name.endswith(("token_id", "token_index")) and type(value) is int and value >= vocabulary:
            setattr(config, name, next(free))


def _tower(config: Any, tp: int, text_width: int) -> Any:
    """A tower with small sizes, whose output has the width of the text where the config says which width that is."""
    tower = copy.deepcopy(config)
    names_both = type(vars(tower).get("embed_dim")) is int and "hidden_size" in vars(tower)
    if names_both:  # its layers have the first one, its output the second
        tower.hidden_size = tower.embed_dim
    tower = scaled(tower, tp)
    if _OF_PATCHES in vars(tower):
        tower.hidden_size = _ROTATED * tower.num_attention_heads
        _shrink_patches(tower)
    if names_both:
        tower.embed_dim, tower.hidden_size = tower.hidden_size, text_width
    for name in _OUTPUTS:
        if type(vars(tower).get(name)) is int:
            setattr(tower, name, text_width)
    keep_layer_indexes(tower)
    return tower


def _shrink_patches(tower: Any) -> None:
    """Small patches; and windows of one merged patch, so that a small image has several."""
    if type(vars(tower).get("patch_size")) is int:
        tower.patch_size = min(tower.patch_size, _PATCH)
        if type(vars(tower).get("window_size")) is int:
            tower.window_size = tower.patch_size * tower.spatial_merge_size


def _match_projections(small: Any, real: Any) -> None:
    """A text that is projected to the width of images stays so."""
    images = getattr(small, "vision_config", None)
    width = getattr(getattr(real, "vision_config", None), "hidden_size", None)
    if images is not None and vars(real.text_config).get("projection_size") == width:
        small.text_config.projection_size = images.hidden_size


def _keep_feature_layers(small: Any) -> None:
    """Of the layers of a tower whose outputs are read, those that there are: others are the last one."""
    chosen, layers = vars(small).get(_LAYER), getattr(getattr(small, "vision_config", None), "num_hidden_layers", None)
    if type(layers) is not int or chosen is None:
        return
    kept = [
        index if -layers - 1 <= index <= layers else layers for index in ([chosen] if type(chosen) is int else chosen)
    ]
    setattr(small, _LAYER, kept[0] if type(chosen) is int else kept)
