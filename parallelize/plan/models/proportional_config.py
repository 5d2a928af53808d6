"""A config in which each width has a smaller one, the same in all of its parts: what was equal stays equal, and
products hold.

The rules of `small_config` change fields by their names, one part at a time. A model of several parts, such as towers
and projectors, has widths that must agree under names that only its own code knows. Here a value is what is changed:
4096 becomes the same number wherever it stands, and heads times the width of a head stays the hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import nn

from parallelize.plan.models.image_inputs import shrink_images

HEAD_WIDTH = 16
_MAX_HEADS = 8
_FEW_HEADS = 4
_RATIO = 0.25  # of widths that no heads make up
_MAX_LAYERS = 3
QUERY_COUNTS = ("num_queries", "latent_query_num")
QUERIES = 7
_BOXES = {"max_2d_position_embeddings", "dim_bbox"}
_VOCABULARY = 131
_POSITIONS = 512
_SMALLEST = 48  # widths below this stay
_WIDTH = re.compile(
    r"size|dim|width|rank|channels|d_model|d_ff|d_kv|d_head|d_latents|inner|ffn|embd|hidden|features|units|planes"
)
_NO_WIDTH = re.compile(
    r"token|vocab|position|length|layers|image|patch|kernel|stride|window|frame|sampl(?!\w*channels)|mel|bins|fft|hop|groups|ctx|grid|steps|interval|chunk"
    r"|rate|index|scale|buckets|range|types|labels|crop|context|num_|max_|codebook_size|batch|block_size|sparse|memory|queue|topk|top_k"
)
_HEADS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_hidden_size", "hidden_dim", "width")
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention_head_size", "global_head_dim")
_OUTPUTS = ("out_hidden_size", "output_dim", "projection_dim")
_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_LAYERS = ("num_hidden_layers", "depth")
_STATE_HEADS = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "mamba_expand"),
)
"""Heads, their width, and how many times the hidden size they are wide together."""


def divided(config: Any, head_width: int = HEAD_WIDTH) -> Any:
    """The config with widths of about eight heads, few layers, and small vocabularies and images.

    head_width: of a head; 0: that of the config, with four heads.

    Raises: whatever the class of the config raises for sizes that it does not take.
    """
    small = copy.deepcopy(config)
    widths = _Widths(head_width)
    parts = list(_parts(small))
    for part in parts:
        _divide_heads(part, widths)
    latent = {id(part): _latent_ratio(part) for part in parts}
    for part in parts:
        _divide_widths(part, widths)
        _divide_groups(part, widths)
        _divide_counts(part)
        _divide_state_heads(part)
        _divide_latent(part, latent[id(part)])
        _divide_boxes(part)
        if head_width:
            _divide_rotary(part, head_width)
    _match_outputs(small, parts)
    shrink_images(parts)
    small_tokens(parts)
    return small


def _match_outputs(config: Any, parts: list[Any]) -> None:
    """A tower's output takes the place of tokens, so that it has the width of the text, which default configs may not
    say."""
    text = getattr(config, "text_config", None)
    width = getattr(text, "hidden_size", None)
    names = _OUTPUTS if any(type(vars(config).get(token)) is int for token in _TOKENS) else _OUTPUTS[:1]
    for part, name in product(parts, names):
        if type(width) is int and part is not text and type(vars(part).get(name)) is int:
            setattr(part, name, width)


def _parts(config: Any) -> Iterator[Any]:
    """A config and those inside of it, at any depth, outermost first."""
    without_dropout(config)
    yield config
    for value in list(vars(config).values()):
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "to_dict") and hasattr(part, "model_type"):
                yield from _parts(part)


class _Widths:
    """What each width became.

    head_width: of a head; 0: that of the config.
    """

    def __init__(self, head_width: int) -> None:
        self.head_width = head_width
        self.new: dict[int, int] = {}
        self.ratio = _RATIO

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
    (_, heads), (_, kv_heads) = _first(part, _HEADS), _first(part, _KV_HEADS)
    (_, hidden), (_, head_dim) = _first(part, _HIDDEN), _first(part, _HEAD_DIMS)
    if not heads or not hidden:
        return
    most = _MAX_HEADS if widths.head_width else _FEW_HEADS
    # boxes make up the hidden size
    fewer = heads if _BOXES & vars(part).keys() else _fewer(heads, kv_heads or heads, most)
    fewer_kv = _fewer_kv(heads, kv_heads or heads, fewer)
    for name, value in list(vars(part).items()):
        if type(value) is int and name.endswith(("heads", "n_head")) and "mamba" not in name and "linear" not in name:
            small = fewer_kv if value == kv_heads else max(1, value * fewer // heads)
            setattr(part, name, small)
    head = widths.head_width or head_dim or hidden // heads
    new = widths.note(hidden, fewer * head)
    for name in _HEAD_DIMS:
        if type(value := vars(part).get(name)) is int and value >= head:
            setattr(part, name, new // fewer if value * heads == hidden else head * max(1, value // head_dim))


def _fewer(heads: int, kv_heads: int, most: int) -> int:
    """A smaller number of heads, four of each kind where there are four; `most` where that does not divide them."""
    fit = [d for d in range(1, heads + 1) if heads % d == 0 and kv_heads % d == 0]
    fit = [d for d in fit if all((count // d) % 4 == 0 or count % 4 for count in (heads, kv_heads))]
    fewer = heads // next((d for d in fit if heads // d <= most), fit[-1] if fit else 1)
    return fewer if fewer % most == 0 else most


def _fewer_kv(heads: int, kv_heads: int, fewer: int) -> int:
    """The key/value heads beside `fewer` heads: in the same ratio, or as many as divide them."""
    if kv_heads in (1, heads):
        return 1 if kv_heads == 1 else fewer
    same_ratio = kv_heads * fewer // heads if kv_heads * fewer % heads == 0 else 0
    return same_ratio if same_ratio and fewer % same_ratio == 0 else max(1, fewer // 2)


def _divide_state_heads(part: Any) -> None:
    """Heads of state-space layers, whose widths together are a multiple of the hidden size; and widths that are sums of
    others."""
    fields, hidden = vars(part), vars(part).get("hidden_size")
    for heads, width, expand in _STATE_HEADS:
        if all(type(fields.get(name)) is int for name in (heads, width, expand)) and type(hidden) is int:
            setattr(part, width, HEAD_WIDTH)
            setattr(part, heads, fields[expand] * hidden // HEAD_WIDTH)


def _latent_ratio(part: Any) -> float:
    """How many times as wide as its rotated part the config says that a head is; 0: there is no such part."""
    rotated, width = vars(part).get("qk_rope_head_dim"), vars(part).get("head_dim")
    return width / rotated if type(rotated) is int and type(width) is int and rotated else 0.0


def _divide_latent(part: Any, ratio: float) -> None:
    """Heads of attention with latent keys, which have a rotated part and one that is not."""
    if "qk_rope_head_dim" not in vars(part) or "qk_nope_head_dim" not in vars(part):
        return
    part.qk_rope_head_dim = part.qk_nope_head_dim = part.v_head_dim = HEAD_WIDTH
    if "qk_head_dim" in vars(part):
        part.qk_head_dim = 2 * HEAD_WIDTH
    if ratio:
        part.head_dim = round(HEAD_WIDTH * ratio)


def _divide_boxes(part: Any) -> None:
    """Embeddings of the corners and sides of boxes, which together have the hidden size."""
    fields, hidden = vars(part), vars(part).get("hidden_size")
    if "coordinate_size" in fields:
        part.coordinate_size = part.shape_size = hidden // 6
    if "dim_bbox_projection" in fields:
        part.dim_bbox_sinusoid_emb_2d = hidden // 4
        part.dim_bbox_sinusoid_emb_1d = hidden // 4 // part.dim_bbox
        part.dim_bbox_projection = hidden // part.num_attention_heads


def _divide_widths(part: Any, widths: _Widths) -> None:
    _, hidden = _first(part, _HIDDEN)
    if hidden in widths.new:  # so that other widths stay the multiples of it that they are
        widths.ratio = widths.new[hidden] / hidden
    for name, value in list(vars(part).items()):
        if name in _HEAD_DIMS or _NO_WIDTH.search(name) or not _WIDTH.search(name):
            continue
        if type(value) is int:
            setattr(part, name, widths(value))
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            setattr(part, name, type(value)(widths(item) for item in value))


def _divide_groups(part: Any, widths: _Widths) -> None:
    """The width of a group of channels, so that each width has as many groups as before, which the same numbers of
    ranks divide."""
    groups = vars(part).get("groups_width")
    if type(groups) is int:
        part.groups_width = max(2, round(groups * widths.ratio))


def _divide_counts(part: Any) -> None:
    """Few layers, of each kind one, and short tables of positions."""
    counts = {
        value for name, value in vars(part).items() if type(value) is int and _is_depth(name) and value > _MAX_LAYERS
    }
    chosen = first_of_each_kind(_kinds_of_layers(part, counts))
    for name, value in list(vars(part).items()):
        if type(value) is int and _is_depth(name):
            setattr(part, name, min(value, len(chosen)))
        elif isinstance(value, (list, tuple)) and len(value) in counts:
            setattr(part, name, type(value)(_limit_depth(name, value[index]) for index in chosen))
        elif name.endswith("layer_ids") and isinstance(value, list) and counts:
            setattr(part, name, [chosen.index(index) for index in value if index in chosen])
        elif name in _DEPTHS and isinstance(value, (list, tuple)):
            setattr(part, name, type(value)(_limit_depth(name, depth) for depth in value))
        elif (
            type(value) is int
            and name.endswith(("experts", "expert_num"))
            and value > _MAX_HEADS
            and "_per_" not in name
        ):
            setattr(part, name, _MAX_HEADS)
        elif name == "first_k_dense_replace" and type(value) is int:
            setattr(part, name, min(value, 1))
        elif name in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts") and type(value) is int:
            setattr(part, name, min(value, 2))
        elif name in ("n_group", "topk_group") and type(value) is int:
            setattr(part, name, 1)
        elif name in QUERY_COUNTS and type(value) is int:
            setattr(part, name, min(value, QUERIES))
        elif name == "num_kv_shared_layers" and type(value) is int:
            setattr(part, name, 0)
    keep_layer_indexes(part)


def keep_layer_indexes(part: Any) -> None:
    """Lists that name layers by their index, such as those whose outputs the text reads too, name layers that there
    still are: of the listed layers those that were kept, or else the last one."""
    _, layers = _first(part, _LAYERS)
    for name, value in list(vars(part).items()):
        listed = isinstance(value, (list, tuple)) and value and all(type(index) is int for index in value)
        if layers and listed and name.endswith("_indexes") and max(value) >= layers:
            kept = [index for index in value if index < layers] or [layers - 1]
            setattr(part, name, type(value)(kept))


_DEPTHS = ("depths", "layer_depths")


def _limit_depth(name: str, value: Any) -> Any:
    """Two layers in each stage, of fields that count them; other values as they are."""
    return min(value, 2) if name in _DEPTHS else value


def _kinds_of_layers(part: Any, counts: set[int]) -> list[str]:
    """What each layer is, by name; empty where they are all of one kind."""
    lists = {name: value for name, value in vars(part).items() if isinstance(value, list) and len(value) in counts}
    named = [name for name, value in lists.items() if all(isinstance(kind, str) for kind in value)]
    return lists[min(named, key=lambda name: name != "layer_types")] if named else []


def _is_depth(name: str) -> bool:
    return (
        "kv_shared" not in name
        and name.endswith(("layers", "n_layer", "depth", "num_blocks", "attends_per_block"))
        and "rope" not in name
    )


def first_of_each_kind(kinds: list[Any]) -> list[int]:
    """The first layer of each kind, and others up to three."""
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    others = (index for index in range(_MAX_LAYERS) if index not in chosen)
    return sorted([*chosen, *list(others)[: max(0, _MAX_LAYERS - len(chosen))]])


def _divide_rotary(part: Any, head_width: int) -> None:
    """Sections of a head's channels for time, height and width, which models have defaults for, and lists with a value
    for each pair."""
    rope = vars(part).get("rope_parameters") or vars(part).get("rope_scaling")
    for entry in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(entry, dict) and not any(isinstance(value, dict) for value in entry.values()):
            partial = entry.get("partial_rotary_factor") or vars(part).get("partial_rotary_factor") or 1
            pairs = int(head_width * partial) // 2
            for key, value in entry.items():
                if isinstance(value, (list, tuple)) and len(value) > pairs:
                    entry[key] = list(value)[:pairs]
            entry["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def small_tokens(parts: list[Any]) -> None:
    """Small vocabularies, of which ids that stand for images and the like are the last ones."""
    for part in parts:
        for name, value in list(vars(part).items()):
            if type(value) is int and "vocab" in name and value > _VOCABULARY:
                setattr(part, name, _VOCABULARY)
            elif (
                type(value) is int
                and name.endswith(("position_embeddings", "n_positions", "n_ctx"))
                and value > _POSITIONS
            ):
                setattr(part, name, _POSITIONS)
    ids: dict[int, int] = {}
    for part in parts:
        for name, value in list(vars(part).items()):
            if type(value) is int and re.search(r"token(_id|_index)?$|_id$", name) and value >= _VOCABULARY:
                setattr(part, name, ids.setdefault(value, _VOCABULARY - 1 - len(ids)))
            elif name.endswith("token_id") and isinstance(value, (list, tuple)) and value and max(value) >= _VOCABULARY:
                setattr(part, name, 2)


# -- dropout rates ---------------------------------------------------------------------------------------------------
# Rates of dropout set to zero, in a config or in modules: what is compared or checked is to be the same at each call.


def without_dropout(config: Any) -> None:
    """Set dropout rates in the config to zero, and those of layers and paths that are left out at random."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and _is_rate(name):
            setattr(config, name, 0.0)
        elif name in _AUGMENTATIONS:
            setattr(config, name, None)


def disable_dropout(model: nn.Module) -> None:
    """Set dropout rates of modules to zero, and those of layers and paths that are left out at random."""
    for module in model.modules():
        if any(word in type(module).__name__ for word in ("Dropout", "StochasticDepth")) and isinstance(
            vars(module).get("p"), float
        ):
            setattr(module, "p", 0.0)  # noqa: B010 - mypy: not every module has `p`
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _is_rate(name):
                setattr(module, name, 0.0)


_AUGMENTATIONS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Fields of how far positions are moved at random in training; None: not at all."""

_RATES = (
    "dropout",
    "drop_path",
    "drop_prob",
    "drop_rate",
    "layerdrop",
    "layer_drop",
    "mask_time_prob",
    "mask_feature_prob",
)


def _is_rate(name: str) -> bool:
    return any(rate in name for rate in _RATES) or name.endswith("pdrop")
