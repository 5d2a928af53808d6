"""A config in which each width has a smaller one, the same in all of its parts: what was equal stays equal, and products hold.

The rules of `small_config` change fields by their names, one part at a time. A model of several parts, such as towers and projectors, has
widths that must agree under names that only its own code knows. Here a value is what is changed: 4096 becomes the same number
wherever it stands, and heads times the width of a head stays the hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from parallelize.derivation.small_images import shrink_images
from parallelize.verification.scale import without_dropout

HEAD_WIDTH = 16
_MAX_HEADS = 8
_MAX_LAYERS = 3
_VOCABULARY = 131
_POSITIONS = 512
_SMALLEST = 48  # widths below this stay
_WIDTH = re.compile(r"size|dim|width|rank|channels|d_model|d_ff|d_kv|d_head|inner|ffn|embd|hidden|features|units|planes")
_NO_WIDTH = re.compile(
    r"token|vocab|position|length|layers|image|patch|kernel|stride|window|frame|sampl|mel|bins|fft|hop|groups|ctx|grid|steps|interval|chunk"
    r"|rate|index|scale|buckets|range|types|labels|crop|context|num_|max_|codebook_size|batch|block_size|sparse|memory|queue|topk|top_k"
)
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_hidden_size", "hidden_dim", "width")
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention_head_size", "global_head_dim")


def divided(config: Any) -> Any:
    """The config with widths of about eight heads of 16, few layers, and small vocabularies and images.

    Raises: whatever the class of the config raises for sizes that it does not take.
    """
    small = copy.deepcopy(config)
    widths = _Widths()
    parts = list(_parts(small))
    for part in parts:
        _divide_heads(part, widths)
    for part in parts:
        _divide_widths(part, widths)
        _divide_counts(part)
        _divide_rotary(part)
    shrink_images(parts)
    small_tokens(parts)
    return small


def _parts(config: Any) -> Iterator[Any]:
    """A config and those inside of it, at any depth, outermost first."""
    without_dropout(config)
    yield config
    for value in list(vars(config).values()):
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "to_dict") and hasattr(part, "model_type"):
                yield from _parts(part)


class _Widths:
    """What each width became."""

    def __init__(self) -> None:
        self.new: dict[int, int] = {}
        self.ratio = 1.0

    def note(self, old: int, new: int) -> int:
        self.ratio = new / old
        return self.new.setdefault(old, new)

    def __call__(self, value: int) -> int:
        """The new width, a multiple of 8; a new value in proportion where it was not seen before."""
        if value < _SMALLEST:
            return value
        if value not in self.new:
            new = max(2, round(value * self.ratio / 8)) * 8
            while new in self.new.values():
                new += 8
            self.new[value] = new
        return self.new[value]


def _first(part: Any, names: tuple[str, ...]) -> tuple[str, int]:
    for name in names:
        name = getattr(part, "attribute_map", {}).get(name, name)
        if type(value := vars(part).get(name)) is int and value > 0:
            return name, value
    return "", 0


def _divide_heads(part: Any, widths: _Widths) -> None:
    """Fewer heads of 16, whose product stays the hidden size where it was."""
    (field, heads), (kv_field, kv_heads) = _first(part, _HEADS), _first(part, _KV_HEADS)
    (hidden_field, hidden), (_, head_dim) = _first(part, _HIDDEN), _first(part, _HEAD_DIMS)
    if not heads or not hidden:
        return
    by = _divisor(heads, kv_heads or heads)
    for name, value in list(vars(part).items()):
        if type(value) is int and (name == field or (name.endswith("heads") and "kv" not in name and value == heads)):
            setattr(part, name, value // by)
    if kv_field and kv_field != field and vars(part)[kv_field] == kv_heads:
        setattr(part, kv_field, max(1, kv_heads // by))
    new = widths.note(hidden, heads // by * HEAD_WIDTH)
    for name in _HEAD_DIMS:
        if type(value := vars(part).get(name)) is int and value >= HEAD_WIDTH:
            setattr(part, name, new // (heads // by) if value * heads == hidden else HEAD_WIDTH * max(1, value // head_dim))


def _divisor(heads: int, kv_heads: int) -> int:
    """By what heads and key/value heads are divided: four of each stay where there are four."""
    fit = [d for d in range(1, heads + 1) if heads % d == 0 and kv_heads % d == 0]
    fit = [d for d in fit if all((count // d) % 4 == 0 or count % 4 for count in (heads, kv_heads))]
    return next((d for d in fit if heads // d <= _MAX_HEADS), fit[-1] if fit else 1)


def _divide_widths(part: Any, widths: _Widths) -> None:
    for name, value in list(vars(part).items()):
        if name in _HEAD_DIMS or _NO_WIDTH.search(name) or not _WIDTH.search(name):
            continue
        if type(value) is int:
            setattr(part, name, widths(value))
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            setattr(part, name, type(value)(widths(item) for item in value))


def _divide_counts(part: Any) -> None:
    """Few layers, of each kind one, and short tables of positions."""
    counts = {value for name, value in vars(part).items() if type(value) is int and _is_depth(name) and value > _MAX_LAYERS}
    kinds = vars(part).get("layer_types") or []
    chosen = _layers(kinds)
    for name, value in list(vars(part).items()):
        if type(value) is int and _is_depth(name):
            setattr(part, name, min(value, len(chosen)))
        elif isinstance(value, (list, tuple)) and len(value) in counts:
            setattr(part, name, type(value)(value[index] for index in chosen))
        elif name in ("depths", "layer_depths") and isinstance(value, (list, tuple)):
            setattr(part, name, type(value)(min(depth, 2) for depth in value))
        elif type(value) is int and name.endswith(("experts", "expert_num")) and value > _MAX_HEADS and "per" not in name:
            setattr(part, name, _MAX_HEADS)
        elif name == "first_k_dense_replace" and type(value) is int:
            setattr(part, name, min(value, 1))


def _is_depth(name: str) -> bool:
    return name.endswith(("layers", "n_layer", "depth", "num_blocks")) and "rope" not in name


def _layers(kinds: list[str]) -> list[int]:
    """The first layer of each kind, and others up to three."""
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    others = (index for index in range(_MAX_LAYERS) if index not in chosen)
    return sorted([*chosen, *list(others)[: max(0, _MAX_LAYERS - len(chosen))]])


def _divide_rotary(part: Any) -> None:
    """Sections of a head's channels for time, height and width."""
    rope = vars(part).get("rope_parameters") or vars(part).get("rope_scaling")
    for entry in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(entry, dict):
            pairs = int(HEAD_WIDTH * (entry.get("partial_rotary_factor") or 1)) // 2
            if "mrope_section" in entry:
                third = pairs // 3
                entry["mrope_section"] = [pairs - 2 * third, third, third]
            for key, value in entry.items():
                if isinstance(value, (list, tuple)) and len(value) > pairs:
                    entry[key] = list(value)[:pairs]


def small_tokens(parts: list[Any]) -> None:
    """Small vocabularies, of which ids that stand for images and the like are the last ones."""
    for part in parts:
        for name, value in list(vars(part).items()):
            if type(value) is int and name.endswith("vocab_size") and value > _VOCABULARY:
                setattr(part, name, _VOCABULARY)
            elif type(value) is int and name.endswith(("position_embeddings", "n_positions", "n_ctx")) and value > _POSITIONS:
                setattr(part, name, _POSITIONS)
    ids: dict[int, int] = {}
    for part in parts:
        for name, value in list(vars(part).items()):
            if type(value) is int and re.search(r"token(_id|_index)?$|_id$", name) and value >= _VOCABULARY:
                setattr(part, name, ids.setdefault(value, _VOCABULARY - 1 - len(ids)))
            elif name.endswith("token_id") and isinstance(value, (list, tuple)) and value and max(value) >= _VOCABULARY:
                setattr(part, name, 2)
