"""A config of scans (Mamba 2) or linear attention scaled down, whose heads and their widths have names of their own."""

from __future__ import annotations

from math import lcm
from typing import Any

from parallelize.tools.verification.scale import scaled

_SCANS = (("num_heads", "head_dim"), ("mamba_num_heads", "mamba_head_dim"))
_GROUPS = "n_groups"
_WIDTH = 6  # of a head
_STATE = 20  # channels of a state, at most
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_LINEAR_WIDTHS = {"linear_key_head_dim": 16, "linear_value_head_dim": 20}
_STATES = ("state_size", "ssm_state_size")


def has_scans(config: Any) -> bool:
    """Whether a config says the heads, groups and states of scans in the fields that are known here."""
    fields = vars(config)
    if all(type(fields.get(name)) is int for name in (*_LINEAR_HEADS, *_LINEAR_WIDTHS)):
        return True
    return _names(fields) is not None and type(fields.get(_GROUPS)) is int and any(name in fields for name in _STATES)


def scaled_scans(config: Any, tp: int, *args: Any, **sizes: Any) -> Any:
    """A config of scans with few narrow heads. For the arguments see `scaled`, which does the rest.

    Groups stay, and `tp` divides the heads where it divides the real ones. Where heads and their width make up a multiple of the hidden
    size, and no attention has it, the hidden size follows.
    """
    small, real = scaled(config, tp, *args, **sizes), vars(config)
    if _LINEAR_HEADS[0] in real:
        _scale_linear(small, real, tp)
        return small
    heads, width = _names(real) or ("", "")
    if real[heads] % tp or real[heads] % real[_GROUPS]:
        return small  # the real model cannot be sharded; this one must fail in the same way
    few = min(real[heads], 2 * lcm(real[_GROUPS], tp))
    setattr(small, heads, few)
    setattr(small, width, min(real[width], _WIDTH))
    for name in _STATES:
        if type(value := real.get(name)) is int:
            setattr(small, name, min(value, _STATE))
    expand = real.get("expand")
    if type(expand) is int and expand * config.hidden_size == real[heads] * real[width] and heads == "num_heads":
        small.hidden_size = few * vars(small)[width] // expand
    return small


def _scale_linear(small: Any, real: dict[str, Any], tp: int) -> None:
    """Fewer and narrower heads of linear attention, in the ratio of values to keys that they have."""
    keys, values = (real[name] for name in _LINEAR_HEADS)
    if keys % tp == 0 and values % keys == 0:
        few = min(keys, 2 * tp)
        for name, count in zip(_LINEAR_HEADS, (few, few * values // keys), strict=True):
            setattr(small, name, count)
    for name, most in _LINEAR_WIDTHS.items():
        setattr(small, name, min(real[name], most))


def _names(fields: dict[str, Any]) -> tuple[str, str] | None:
    return next((names for names in _SCANS if all(type(fields.get(name)) is int for name in names)), None)
