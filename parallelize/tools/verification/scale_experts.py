"""The part of a scaled config that experts and latent attention need: fewer experts, narrower ones, narrower heads.

What stays: how many experts a group has to the number of groups' choices, whether `ep` and `tp` divide the experts and their
width, and the ratios of the widths of a latent attention. Fields that are small stay as they are.
"""

from __future__ import annotations

from math import lcm
from typing import Any

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICES = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
_MANY = 12  # experts, above which there are fewer
_WIDE = 48  # channels of an expert, above which there are fewer
_MAX_CHOICES = 3
_MAX_GROUPS = 4
_RANK_RATIO = 4  # of the ranks of queries to those of keys and values, at most
_NARROW = 20  # the first expert width that is tried


def scale_latent_heads(config: Any, width: int) -> None:
    """Scale the heads of attention with latent keys to rotated parts of `width` channels, and its ranks."""
    fields = vars(config)
    if type(rotated := fields.get("qk_rope_head_dim")) is not int:
        return
    for name in ("qk_nope_head_dim", "v_head_dim"):
        if type(value := fields.get(name)) is int:
            setattr(config, name, max(1, value * width // rotated))
    config.qk_rope_head_dim = width
    if "qk_head_dim" in fields:
        config.qk_head_dim = width + config.qk_nope_head_dim
    kv_rank, q_rank = fields.get("kv_lora_rank"), fields.get("q_lora_rank")
    if type(kv_rank) is int:
        config.kv_lora_rank = width + 4
    if type(kv_rank) is int and type(q_rank) is int:
        config.q_lora_rank = (width + 4) * min(_RANK_RATIO, max(1, q_rank // kv_rank)) + 2


def scale_experts(config: Any, real: Any, tp: int, ep: int = 1, etp: int = 1) -> None:
    """Scale the number of experts, of their groups and choices, and the widths that `scaled` has left as they are in `real`."""
    for name in COUNTS:
        if type(count := vars(config).get(name)) is int and count > _MANY:
            setattr(config, name, _fewer_experts(config, count, ep))
    _scale_widths(config, real, lcm(tp, etp))


def _fewer_experts(config: Any, count: int, ep: int) -> int:
    """A number of experts that `ep` and the groups divide where they divide `count`, with two experts for each rank or group."""
    groups, chosen = vars(config).get("n_group") or 1, vars(config).get("topk_group") or 1
    few_groups = min(groups, _MAX_GROUPS)
    if groups > 1:
        config.n_group, config.topk_group = few_groups, max(1, chosen * few_groups // groups)
    for name in CHOICES:
        if type(choices := vars(config).get(name)) is int:
            setattr(config, name, min(choices, _MAX_CHOICES))
    few = lcm(few_groups, ep if count % ep == 0 else 1)
    per_rank = 2 if count >= 2 * max(few, ep) else 1
    few *= -(-max(per_rank * ep, 2 * few_groups, 2 * _MAX_CHOICES) // few)
    few += few_groups if count % ep and few % ep == 0 else 0
    return min(count, few)


def _scale_widths(config: Any, real: Any, divisor: int) -> None:
    """Widths of experts and shared experts: equal ones stay equal, others differ from each other and from all other sizes."""
    fields = vars(config)
    new: dict[int, int] = {}
    for name, value in list(fields.items()):
        if not name.endswith("intermediate_size") or type(value) is not int or value <= _WIDE:
            continue
        if value != vars(real).get(name):  # scaled already
            continue
        if value not in new:
            used = {*new.values(), *(size for size in vars(config).values() if type(size) is int)}
            new[value] = _unused(used, divisor, divides=value % divisor == 0)
        setattr(config, name, new[value])


def _unused(used: set[int], divisor: int, divides: bool) -> int:
    """The first size from `_NARROW` on that no other size equals, and that `divisor` divides if `divides`."""
    size = -(-_NARROW // divisor) * divisor + (0 if divides or divisor == 1 else 1)
    while size in used:
        size += divisor
    return size
