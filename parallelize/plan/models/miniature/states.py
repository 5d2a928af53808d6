"""Small sizes of layers that carry a state along the sequence: scans (Mamba 2), and linear attention.

A real config often has one group of state heads, whose B and C all of them read. A plan is for any number of groups, as
it is for key/value heads.
"""

from __future__ import annotations

from itertools import product
from math import lcm
from typing import Any

from parallelize.plan.models.miniature.roles import ConfigPart, Role
from parallelize.plan.models.miniature.rules import Rules

_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_WIDTHS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_TOTALS = ("mamba_d_ssm",)
_EXPANDS = ("mamba_expand", "expand")
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
_LINEAR_WIDTHS = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")
_NARROWEST, _WIDTH, _STATE, _CHUNK = 4, 6, 10, 4


def scale_states(part: ConfigPart, parts: list[ConfigPart], rules: Rules) -> int:
    """Few narrow state heads, whose counts no other field of the config has. Returns the hidden size that follows from
    those of a part without attention; 0: it does not follow."""
    if any(part.number(name) for name in _STATES):
        for name in _CHUNKS:
            if value := part.number(name):
                part[name] = min(value, _CHUNK)
    _scale_linear_heads(part, parts, rules)
    return _scale_scan(part, parts, rules)


def _scale_scan(part: ConfigPart, parts: list[ConfigPart], rules: Rules) -> int:
    names = [_field(part, names) for names in (_HEADS, _WIDTHS, _GROUPS, _STATES)]
    if not all(names):
        return 0
    heads, width, groups, state = (part.number(name) for name in names)
    if rules.ratios_kept and (heads % rules.tp or heads % groups):
        return 0  # the real model cannot be sharded; this one must fail in the same way
    taken = _counts(parts, names) if rules.distinct else set()
    expand = part.real.get(_field(part, _EXPANDS, (int, float)) or "", 0)
    total = _total(part, heads * width, expand)
    for few_groups, ratio in product(*_choices(heads, groups, rules)):
        few = few_groups * ratio
        wide, rest = divmod(total or few * _WIDTH, few)
        distinct = {few_groups, few, wide, _STATE}
        if rest or wide < _NARROWEST or (rules.distinct and (distinct & taken or len(distinct) < 4)):
            continue
        for name, value in zip(names, (few, wide, few_groups, min(state, _STATE)), strict=True):
            part[name] = value
        for name in _TOTALS:
            if part.number(name):
                part[name] = few * wide
        free = not total and expand and expand * part.number("hidden_size") == heads * width
        return int(few * wide // expand) if free else 0
    return 0


def _choices(heads: int, groups: int, rules: Rules) -> tuple[Any, Any]:
    """(groups, heads of a group) to try: of a family any number that tp divides; of one model its groups, and heads
    that tp divides."""
    tp = rules.tp
    if not rules.ratios_kept:
        return range(tp, 16 * tp, tp), (2, 3, 4)
    least = lcm(groups, tp) // groups
    return [groups], [ratio for ratio in (2 * least, *range(least, 8 * least, least)) if groups * ratio <= heads]


def _total(part: ConfigPart, real: int, expand: float) -> int:
    """The width of all heads together, where it follows from a hidden size that is that of attention too; 0: it is
    free."""
    hidden, small = part.number("hidden_size"), part["hidden_size"]
    if any(part.number(name) for name in _TOTALS):
        return int(small)
    has_attention = any(part.numbers(Role.HEADS))
    return int(expand * small) if has_attention and expand and expand * hidden == real else 0


def _scale_linear_heads(part: ConfigPart, parts: list[ConfigPart], rules: Rules) -> None:
    """Heads of linear attention, in the ratio of values to keys that they have."""
    heads = {name: value for name in _LINEAR_HEADS if (value := part.number(name))}
    widths = [name for name in _LINEAR_WIDTHS if part.number(name)]
    if not heads or not widths:
        return
    least, tp = min(heads.values()), rules.tp
    if rules.ratios_kept and least % tp:
        return
    taken = _counts(parts, [*heads, *widths]) if rules.distinct else set()
    for count in range(2 * tp, 16 * tp, tp):
        sizes = {name: count * (value // least) for name, value in heads.items()}
        if not taken & set(sizes.values()):
            free = (value for value in range(_WIDTH, 64, 2) if value not in taken | set(sizes.values()))
            for name, value in (sizes | dict(zip(widths, free, strict=False))).items():
                part[name] = value
            return


def _counts(parts: list[ConfigPart], own: list[str]) -> set[int]:
    """The numbers of heads, groups and channels of all parts, other than these fields of a part."""
    roles = (Role.HEADS, Role.KV_HEADS, Role.HEAD_WIDTH, Role.HIDDEN, Role.STATE)
    names = {name for part in parts for name, _ in part.numbers(*roles)} - {*own}
    return {value for part in parts for name in names if type(value := part[name]) is int and value > 1}


def _field(part: ConfigPart, names: tuple[str, ...], types: tuple[type, ...] = (int,)) -> str:
    """The first of these fields that a config has with a number; empty: none."""
    return next((name for name in names if type(part.real.get(name)) in types), "")
