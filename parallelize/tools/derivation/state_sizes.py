"""Small sizes of layers that carry a state along the sequence: state-space mixers, and linear attention.

A real config often has one group of state heads, whose B and C all of them read. A plan is for any number of groups, as it is for key/value
heads: the small config has several, with two heads or more for each. Counts differ from those of attention, so that each is read from its
own field.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

from parallelize.tools.derivation.unit_count_fields import counts

_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_WIDTHS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_TOTALS = ("mamba_d_ssm",)
_EXPANDS = ("mamba_expand", "expand")
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
_LINEAR_WIDTHS = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")
_NARROWEST, _STATE, _CHUNK = 4, 10, 4
_NARROWEST_LINEAR = 6


def with_state_heads(config: Any, tp: int) -> Any:
    """The config with few heads that carry a state, whose counts no other field has; None where it has no such heads, or they do not fit."""
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
        if not rest and wide >= _NARROWEST and len(distinct) == 4 and not distinct & taken:
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
    """Of all heads together: a multiple of the hidden size where the config says so, or the hidden size where it is a number of its own."""
    if _field(part, _TOTALS):
        return int(part.hidden_size)
    expand = _field(part, _EXPANDS, (int, float))
    if expand and type(vars(part).get("hidden_size")) is int:
        return int(vars(part)[expand] * part.hidden_size)
    return int(vars(part)[heads] * vars(part)[width])


def _field(part: Any, names: tuple[str, ...], types: tuple[type, ...] = (int,)) -> str:
    """The first of these fields that a config has with a number; empty: none."""
    return next((name for name in names if type(vars(part).get(name)) in types), "")
