"""A small config whose counts all differ, so that a size tells from which field it came.

`verification.scale` keeps the ratios of one model, to fail where it fails. A plan is for a family: here query heads are three for each
key/value head where the config has both, and every count is one that `tp` divides.
"""

from __future__ import annotations

import copy
from typing import Any

from parallelize.verification.scale import scaled, without_dropout

_RATIO = 3  # query heads for each key/value head
_MAX_LAYERS = 3
_EXPERTS = 6
_WIDE = 256  # widths above this are scaled


def small_configs(config: Any, tp: int) -> list[Any]:
    """Small versions of a config, the one that tells most first; a model may refuse it."""
    versions = [_grouped(config, tp), config]
    return [_small(version, config, tp) for version in versions if version is not None]


def _grouped(config: Any, tp: int) -> Any:
    """The config with fewer key/value heads than query heads, and with counts that `tp` divides."""
    fields, mapped = vars(config), getattr(config, "attribute_map", {})
    heads_field, hidden_field = (mapped.get(name, name) for name in ("num_attention_heads", "hidden_size"))
    heads, hidden = fields.get(heads_field), fields.get(hidden_field)
    if type(heads) is not int or type(hidden) is not int:
        return None
    grouped = copy.deepcopy(config)
    kv_field = next((name for name in ("num_key_value_heads", "num_kv_heads") if type(fields.get(name)) is int), "")
    if kv_field:
        new = 2 * tp * _RATIO
        setattr(grouped, kv_field, 2 * tp)
    elif heads % (2 * tp):
        new = 4 * tp
    else:
        return None
    setattr(grouped, heads_field, new)
    if hidden % heads == 0:
        setattr(grouped, hidden_field, new * (hidden // heads))
    return grouped


def _small(config: Any, real: Any, tp: int) -> Any:
    small = scaled(config, tp)
    without_dropout(small)
    mapped = getattr(real, "attribute_map", {})

    def pair(name: str) -> tuple[Any, Any]:
        field = mapped.get(name, name)
        return vars(config).get(field), vars(small).get(field)

    heads, hidden = pair("num_attention_heads"), pair("hidden_size")
    for name, value in list(vars(small).items()):
        before = vars(config).get(name)
        if type(value) is not int or value != before or value < 2:
            continue
        if name.endswith(("attention_heads", "num_heads")) and value == heads[0]:
            setattr(small, name, heads[1])
        elif name.endswith("layers") and value > _MAX_LAYERS:
            setattr(small, name, _MAX_LAYERS)
        elif name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") and value > _EXPERTS:
            setattr(small, name, _EXPERTS)
        elif name.endswith(("ffn_dim", "d_ff", "intermediate_size")) and value > _WIDE:
            setattr(small, name, 8 * tp * 3)
        elif name == "rotary_dim" and hidden[1] and heads[1]:
            setattr(small, name, min(value, hidden[1] // heads[1] // 2 * 2))
        elif name in ("image_size",) and value > 64:
            patch = vars(small).get("patch_size")
            setattr(small, name, 2 * patch if type(patch) is int else 64)
    return small
