"""A tiny config with pairwise distinct counts, so that every size identifies its field.

`verification.scale` keeps the ratios of one model, to fail where it fails. A plan is for a family: here query heads are
three for each key/value head where the config has both, and every count is one that `tp` divides.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from parallelize.plan.model_facts import describe
from parallelize.plan.models.image_inputs import side_of
from parallelize.plan.models.proportional_config import (
    HEAD_WIDTH,
    QUERIES,
    QUERY_COUNTS,
    divided,
    first_of_each_kind,
    keep_layer_indexes,
    without_dropout,
)
from parallelize.plan.parameter_layouts import dotted
from parallelize.tools.verification.scale import scaled
from parallelize.tools.verification.scale_parts import set_tokens

_RATIO = 3  # query heads for each key/value head
_MAX_LAYERS = 3
_MAX_KINDS = 4  # of layers
_MAX_DEPTH = 2  # layers of a stage
_EXPERTS = 6
_WIDE = 256  # widths above this are scaled
_MORE_HEADS = 4
_NARROWEST = 4  # a head
_STAGE_HEADS = ("num_attention_heads", "num_heads")
_STAGE_WIDTHS = ("hidden_sizes", "embed_dim", "embed_dims")


_OUTPUTS = ("out_hidden_size", "projection_dim", "output_dim", "output_size", "text_hidden_size")
"""Fields of towers and projectors whose value may be the width of the text."""

_SIZES = dict(
    vocab_size=67,
    hidden_size=72,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=4,
    swa_num_attention_heads=12,
    swa_num_key_value_heads=4,
    head_dim=10,
    intermediate_size=104,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERT_SIZES = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=40,
    num_experts=6,
    num_local_experts=6,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    qk_head_dim=16,
)
_STATE_SIZES = dict(
    index_n_heads=4,
    index_head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    mamba_dt_rank=8,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=4,
    mamba_n_groups=4,
)
"""Of layers that choose keys, or carry a state: as large beside the others as in real models."""


def small_configs(config: Any, tp: int) -> Iterator[Any]:
    """Small versions of a config, the one that tells most first; a model may refuse any."""
    for small in _versions(config, tp):
        with suppress(Exception):
            yield from _with_more_heads(small)
        if (grouped := with_state_heads(small, tp)) is not None:
            yield grouped
        yield small


def _with_more_heads(config: Any) -> Iterator[Any]:
    """The config with four times as many heads in each stage, where a list says how many and they are wide enough: of
    1, 2 and 5 heads two ranks split some, and four none."""
    fields = vars(config)
    for name in _STAGE_HEADS:
        heads, widths = (
            fields.get(name),
            next((fields[w] for w in _STAGE_WIDTHS if isinstance(fields.get(w), (list, tuple))), ()),
        )
        if not isinstance(heads, (list, tuple)):
            continue
        if type(fields.get("embed_dim")) is int:
            yield _with_wider_stages(config, name, type(heads)(_MORE_HEADS * count for count in heads))
        if len(heads) != len(widths):
            continue
        more = [_MORE_HEADS * count for count in heads]
        if all(width % count == 0 and width // count >= _NARROWEST for width, count in zip(widths, more, strict=True)):
            wider = copy.deepcopy(config)
            setattr(wider, name, type(heads)(more))
            yield wider


def _with_wider_stages(config: Any, name: str, heads: Any) -> Any:
    """The config with these heads, where one width is that of the first stage, from which the others follow."""
    wider = copy.deepcopy(config)
    setattr(wider, name, heads)
    wider.embed_dim = _NARROWEST * heads[0]
    if type(vars(config).get("hidden_size")) is int:
        wider.hidden_size = config.hidden_size * wider.embed_dim // config.embed_dim
    return wider


def _versions(config: Any, tp: int) -> Iterator[Any]:
    versions = [_grouped(config, tp), config]
    scaled_down = [partial(_small, version, config, tp) for version in versions if version is not None]
    fixed = [partial(_fixed, config, latent) for latent in (False, True)]
    has_experts = any(
        name in vars(config) for name in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
    )
    for make in (*fixed, *scaled_down) if has_experts else (*scaled_down, *fixed):
        with suppress(Exception):  # a class of transformers may raise anything for sizes that it does not take
            yield make()
    for head_width in (HEAD_WIDTH, 0):
        with suppress(Exception):
            yield divided(config, head_width)
    with suppress(Exception):
        yield _fewer_layers(config)


def _fewer_layers(config: Any) -> Any:
    """The config as it is, with fewer layers."""
    small = copy.deepcopy(config)
    for name, value in list(vars(small).items()):
        if type(value) is int and value > _MAX_LAYERS and name.endswith("layers"):
            setattr(small, name, _MAX_LAYERS)
    without_dropout(small)
    return small


def _with_small_parts(small: Any, real: Any, tp: int) -> Any:
    """The configs of parts, such as a text model and a vision tower, small too."""
    for name in getattr(small, "sub_configs", None) or {}:
        part = getattr(small, name, None)
        if part is not None and hasattr(part, "to_dict"):
            setattr(small, name, _small(_grouped(part, tp) or part, part, tp))
    text: Any = getattr(small, "text_config", None)
    if type(getattr(text, "vocab_size", None)) is int:
        set_tokens(small, text.vocab_size)
    if type(getattr(text, "hidden_size", None)) is int:
        _set_outputs(small, real, text.hidden_size)
    return small


def _set_outputs(small: Any, real: Any, width: int) -> None:
    """The width that a tower or a projector returns is that of the text, where it is so in the real config."""
    for name, part in (("", small), *((name, getattr(small, name, None)) for name in small.sub_configs)):
        before = getattr(real, name, None) if name else real
        if part is None or before is None:
            continue
        if "embed_dim" in vars(part) and "hidden_size" in vars(part):  # whose output is `hidden_size`
            part.hidden_size = width
        for field in _OUTPUTS:
            if vars(before).get(field) == real.text_config.hidden_size:
                setattr(part, field, width)


def _fixed(config: Any, latent: bool) -> Any:
    """The config with fixed small sizes. `latent`: as many key/value heads as heads, as attention with latent keys
    has."""
    values, mapped = config.to_dict(), getattr(config, "attribute_map", {})
    layers = values.get("num_hidden_layers")
    sizes = {mapped.get(name, name): value for name, value in {**_SIZES, **_EXPERT_SIZES, **_STATE_SIZES}.items()}
    if latent:  # rotary tables have the width of the part of a head that is rotated
        sizes["head_dim"] = _EXPERT_SIZES["qk_rope_head_dim"]
        sizes[mapped.get("num_key_value_heads", "num_key_value_heads")] = _SIZES["num_attention_heads"]
    per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    kinds = [value for value in per_layer.values() if all(isinstance(kind, str) for kind in value)]
    chosen = first_of_each_kind(list(zip(*kinds, strict=True)))[:_MAX_KINDS]
    values |= {name: [value[index] for index in chosen] for name, value in per_layer.items()}
    sizes["num_hidden_layers"] = len(chosen)
    known = {*values, *vars(config)}
    small = type(config).from_dict(values | {name: value for name, value in sizes.items() if name in known})
    without_dropout(small)
    return small


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
    for name, value in fields.items():  # those of an encoder and of a decoder
        if name == heads_field or (name.endswith("attention_heads") and value == heads):
            setattr(grouped, name, new)
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
    patch = vars(small).get("patch_size")
    for name, value in list(vars(small).items()):
        before = vars(config).get(name)
        if name in ("depth", "depths") and isinstance(value, (list, tuple)):
            setattr(small, name, type(value)(min(depth, _MAX_DEPTH) for depth in value))
        if type(value) is not int or value != before or value < 2:
            continue
        if name.endswith(("attention_heads", "num_heads")) and value == heads[0]:
            setattr(small, name, heads[1])
        elif name.endswith("layers") and value > _MAX_LAYERS:
            setattr(small, name, _MAX_LAYERS)
        elif name.endswith("_vocab_size") and value == vars(config).get("vocab_size"):  # of a decoder
            setattr(small, name, small.vocab_size)
        elif name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") and value > _EXPERTS:
            setattr(small, name, _EXPERTS)
        elif name.endswith(("ffn_dim", "d_ff", "intermediate_size", "ffn_hidden_size")) and value > _WIDE:
            setattr(small, name, 8 * tp * 3)
        elif name == "embed_dim" and value > _WIDE:  # of a tower, whose `hidden_size` is that of its output
            setattr(small, name, (heads[1] or 4 * tp) * 16)
        elif name in QUERY_COUNTS:
            setattr(small, name, min(value, QUERIES))
        elif name == "rotary_dim" and hidden[1] and heads[1]:
            setattr(small, name, min(value, hidden[1] // heads[1] // 2 * 2))
        elif name == "image_size" and value > (side := side_of(patch if type(patch) is int else 0, 2)):
            setattr(small, name, side)
        elif name in ("linear_num_key_heads", "linear_num_value_heads") and value % (2 * tp):
            setattr(small, name, 2 * tp * max(1, value // vars(config).get("linear_num_key_heads", value)))
        elif name in ("mamba_n_heads", "num_heads", "mamba_num_heads", "time_step_rank") and value > _WIDE // 4:
            setattr(small, name, 4 * tp)
    keep_layer_indexes(small)
    return _with_small_parts(small, real, tp)


# -- state sizes -----------------------------------------------------------------------------------------------------
# Small sizes of layers that carry a state along the sequence: state-space mixers, and linear attention. A real config
# often has one group of state heads, whose B and C all of them read. A plan is for any number of groups, as it is for
# key/value heads: the small config has several, with two heads or more for each. Counts differ from those of
# attention, so that each is read from its own field.


_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_WIDTHS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_TOTALS = ("mamba_d_ssm",)
_EXPANDS = ("mamba_expand", "expand")
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
_LINEAR_WIDTHS = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")
_NARROWEST_STATE, _STATE, _CHUNK = 4, 10, 4
_NARROWEST_LINEAR = 6


def with_state_heads(config: Any, tp: int) -> Any:
    """The config with few heads that carry a state, whose counts no other field has; None where it has no such heads,
    or they do not fit."""
    small = copy.deepcopy(config)
    parts = list(_parts(small))
    changed = []
    for part in parts:
        others = {value for other in parts if other is not part for value in counts(other).values()}
        changed += [divide(part, tp, others) for divide in (_divide_groups, _divide_linear_heads)]
    return small if any(changed) else None


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _divide_groups(part: Any, tp: int, others: set[int]) -> bool:
    """Whether a config was changed. others: the counts of the other parts."""
    heads, width, groups, state, chunk = (_field(part, names) for names in (_HEADS, _WIDTHS, _GROUPS, _STATES, _CHUNKS))
    if not (heads and width and groups and state):
        return False
    total = _width(part, heads, width)
    own = {heads, width, groups, state}
    taken = others | {value for name, value in counts(part).items() if name not in own}
    for count, ratio in product(range(tp, 16 * tp, tp), (2, 3, 4)):
        wide, rest = divmod(total, count * ratio)
        distinct = {count, count * ratio, wide, _STATE}
        if not rest and wide >= _NARROWEST_STATE and len(distinct) == 4 and not distinct & taken:
            sizes = {groups: count, heads: count * ratio, width: wide, state: _STATE}
            sizes |= {name: total for name in _TOTALS if type(vars(part).get(name)) is int}
            for name, value in (sizes | ({chunk: _CHUNK} if chunk else {})).items():
                setattr(part, name, value)
            return True
    return False


def _divide_linear_heads(part: Any, tp: int, others: set[int]) -> bool:
    """Whether heads of linear attention were changed, in the ratio that they have."""
    heads = {name: value for name in _LINEAR_HEADS if type(value := vars(part).get(name)) is int}
    widths = [name for name in _LINEAR_WIDTHS if type(vars(part).get(name)) is int]
    if not heads or not widths:
        return False
    least = min(heads.values())
    taken = others | {value for name, value in counts(part).items() if name not in (*heads, *widths)}
    for count in range(2 * tp, 16 * tp, tp):
        sizes = {name: count * (value // least) for name, value in heads.items()}
        if not taken & set(sizes.values()):
            free = (value for value in range(_NARROWEST_LINEAR, 64, 2) if value not in taken | set(sizes.values()))
            for name, value in (sizes | dict(zip(widths, free, strict=False))).items():
                setattr(part, name, value)
            return True
    return False


def _width(part: Any, heads: str, width: str) -> int:
    """Of all heads together: a multiple of the hidden size where the config says so, or the hidden size where it is a
    number of its own."""
    if _field(part, _TOTALS):
        return int(part.hidden_size)
    expand = _field(part, _EXPANDS, (int, float))
    if expand and type(vars(part).get("hidden_size")) is int:
        return int(vars(part)[expand] * part.hidden_size)
    return int(vars(part)[heads] * vars(part)[width])


def _field(part: Any, names: tuple[str, ...], types: tuple[type, ...] = (int,)) -> str:
    """The first of these fields that a config has with a number; empty: none."""
    return next((name for name in names if type(vars(part).get(name)) in types), "")


# -- unit count fields -----------------------------------------------------------------------------------------------
# The fields of a config that count features and heads, by which a plan names its sizes.


_NO_COUNT = re.compile(
    r"(num|in|image)_channels$|num_labels$|_ids?$|_index$|layers$|^depth|patch_size|kernel|stride|buckets|version"
    r"|chunk_size|d_conv$|expand$|_rank$"
)


def counted_fields(model: nn.Module) -> dict[str, int]:
    """The counts of a model's config, by the names by which a plan reads them: its fields, and the fields of its
    parts."""
    fields = counts(describe(model).config)
    config = getattr(model, "config", None)
    for name in getattr(config, "sub_configs", None) or {}:
        fields |= {f"config.{name}.{key}": value for key, value in counts(getattr(config, name, None)).items()}
    return fields


def counts(config: Any) -> dict[str, int]:
    """Whole numbers of a config, other than those that count or name something else than features and heads."""
    if config is None:
        return {}
    numbers = {
        name: value for name, value in vars(config).items() if type(value) is int and value > 1 and name.isidentifier()
    }
    numbers |= {f"{name}.{index}": value for name, index, value in _heads_of_stages(config) if value > 1}
    return {
        name: value for name, value in numbers.items() if not _NO_COUNT.search(name) and dotted(config, name) == value
    }


def _heads_of_stages(config: Any) -> Iterator[tuple[str, int, int]]:
    """(field, index, value) of lists that give the number of heads of each stage."""
    for name, values in vars(config).items():
        if "head" in name and isinstance(values, (list, tuple)):
            yield from ((name, index, value) for index, value in enumerate(values) if type(value) is int)
