"""What the fields of a config say, by their names: one table, whatever the family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from functools import cache
from typing import Any


class Role(Enum):
    """What a number in a config counts or names."""

    TOKEN = auto()  # an id
    VOCABULARY = auto()
    POSITIONS = auto()  # rows of a learned table
    DEPTH = auto()  # layers
    DEPTHS = auto()  # layers of each stage
    LAYERS = auto()  # indexes of layers
    DENSE_LAYERS = auto()  # before the first with experts, or with windows
    HEADS = auto()
    KV_HEADS = auto()
    HEAD_WIDTH = auto()
    HIDDEN = auto()
    INNER = auto()  # the width of an MLP
    EXPERT_INNER = auto()  # the width of an expert's MLP
    WIDTH = auto()  # of anything else
    EXPERTS = auto()
    CHOICES = auto()  # experts of a token
    EXPERT_GROUPS = auto()
    GROUP_CHOICES = auto()  # groups of experts of a token
    STATE = auto()  # of layers that carry a state: their heads, widths and groups, by name
    LATENT = auto()  # of attention with latent keys
    OTHER = auto()


_ROLES = (
    (r"(?<!per_)token$|token(_ids?|_index)$|_id$", Role.TOKEN),
    (r"vocab", Role.VOCABULARY),
    (r"(position_embeddings|n_positions|n_ctx|max_seq_len)$", Role.POSITIONS),
    (r"^num_kv_shared_layers$", Role.OTHER),
    (r"^(first_k_dense_replace|max_window_layers)$", Role.DENSE_LAYERS),
    (r"^(?!.*rope).*(layers|n_layer|depth|num_blocks|attends_per_block)$", Role.DEPTH),
    (r"^(layer_)?depths$", Role.DEPTHS),
    (r"_indexes$|layer_ids$", Role.LAYERS),
    (r"^(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)$|_key_value_heads$", Role.KV_HEADS),
    (r"dt_rank$", Role.WIDTH),
    (r"(expand|d_conv|chunk_size|conv_kernel_dim)$", Role.OTHER),
    (r"^(linear|mamba)_|_mamba_|^(n_groups|state_size|ssm_state_size)$", Role.STATE),
    (r"^(q|kv)_lora_rank$|^qk_(rope_|nope_)?head_dim$|^v_head_dim$", Role.LATENT),
    (r"^index_", Role.OTHER),
    (r"heads$|n_head$", Role.HEADS),
    (
        r"^((global_|swa_)?head_dim|d_kv|d_head|kv_channels|attention_head_dim|attention_head_size)$",
        Role.HEAD_WIDTH,
    ),
    (r"^(hidden_size|d_model|n_embd|emb_dim|embed_dim|dim|encoder_hidden_size|hidden_dim|width)$", Role.HIDDEN),
    (r"^(n_group|num_expert_group)$", Role.EXPERT_GROUPS),
    (r"^topk_group$", Role.GROUP_CHOICES),
    (r"^(num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts)$", Role.CHOICES),
    (r"^(?!.*_per_).*(experts|expert_num)$", Role.EXPERTS),
    (r"(moe|expert).*(intermediate_size|ffn_hidden_size|dim)$", Role.EXPERT_INNER),
    (r"intermediate_size|n_inner$|ffn_dim$|d_ff$|ffn_hidden_size$", Role.INNER),
    (
        r"position|length|layers|image|patch|kernel|stride|window|frame|sampl(?!\w*channels)|mel|bins|fft|hop|groups"
        r"|ctx|grid|steps|interval|chunk|rate|index|scale|buckets|range|types|labels|crop|context|num_|max_"
        r"|codebook_size|batch|block_size|sparse|memory|queue|topk|top_k|token",
        Role.OTHER,
    ),
    (
        r"size|dim|width|rank|channels|d_model|d_ff|d_kv|d_head|d_latents|inner|ffn|embd|hidden|features|units|planes",
        Role.WIDTH,
    ),
)
"""Patterns of names: the first that is found says the role."""


@cache
def role_of(name: str) -> Role:
    """What a field of this name says."""
    return next((role for pattern, role in _ROLES if re.search(pattern, name)), Role.OTHER)


def parts_of(config: Any) -> list[Any]:
    """A config and those inside of it, at any depth, outermost first, each once."""
    parts: dict[int, Any] = {}

    def visit(part: Any) -> None:
        if id(part) in parts:
            return
        parts[id(part)] = part
        for value in vars(part).values():
            for inner in value if isinstance(value, list) else [value]:
                if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
                    visit(inner)

    visit(config)
    return list(parts.values())


_SCAN = {"num_heads", "head_dim", "expand"}


class ConfigPart:
    """One config of several, with what the real one says.

    Attributes:
        small: the config that becomes small. real: the fields of the real one.
    """

    def __init__(self, small: Any, real: Any):
        self.small, self.real = small, dict(vars(real))
        self.is_scan = self.real.keys() >= _SCAN

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.small, name, value)

    def __getitem__(self, name: str) -> Any:
        """The field of the small config; None where there is none."""
        return vars(self.small).get(name)

    def role(self, name: str) -> Role:
        """What a field says in this part: heads of a part that has scans alone are those of the scans."""
        return Role.STATE if self.is_scan and name in _SCAN else role_of(name)

    def number(self, name: str) -> int:
        """The whole number that the real config has; 0: it has none."""
        value = self.real.get(name)
        return value if type(value) is int else 0

    def numbers(self, *roles: Role) -> Iterator[tuple[str, int]]:
        """(name, value) of whole numbers above zero that say one of these."""
        for name, value in self.real.items():
            if type(value) is int and value > 0 and self.role(name) in roles:
                yield name, value

    def first(self, role: Role) -> int:
        """The first whole number that says this; 0: there is none."""
        return next((value for _, value in self.numbers(role)), 0)

    def lists(self, *roles: Role) -> Iterator[tuple[str, list[int] | tuple[int, ...]]]:
        """(name, values) of lists of whole numbers that say one of these."""
        for name, value in self.real.items():
            listed = isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value)
            if listed and role_of(name) in roles:
                yield name, value
