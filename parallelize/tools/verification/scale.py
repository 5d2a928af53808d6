"""A config that is scaled down and keeps its structure: small enough for a laptop, without symmetries that hide
mistakes.

What stays: kinds of layers, query heads per key/value head, fewer key/value heads than ranks where the real model has
that, packed projections, ties, whether the heads' width is the hidden size, partial rotary, windows (shorter than the
sequence), and of experts and latent attention what `scale_experts.py` says. What changes: every size, to one that no
other size equals, so that a transposed, permuted or misread tensor has another shape or other values.

The rules apply to field names that all of `transformers` uses. Other fields stay.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from math import lcm
from typing import Any

import torch
from torch import nn

VOCABULARIES = (67, 71, 73)  # primes: no tp size divides them
WINDOW = 5  # tokens of a sliding window
POSITIONS = 64  # positions of learned tables
_FRAMES = 9  # of sound, after the encoder's convolutions
_PATCHES = 3  # along each side of an image
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "n_inner", "ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer")
_PARTIAL = ("rotary_pct", "partial_rotary_factor")
_ROTATED = "rotary_dim"
_PACKED = {"codegen": 4}
"""Parts of a packed weight by model type, each with its heads: a number that the code of the model has, and no
field."""

_SHARED = "num_kv_shared_layers"
_OF_LAYERS = "vocab_size_per_layer_input"
_STATES = ("state_size", "mamba_d_state", "mamba_state_size", "ssm_state_size")
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_CHUNK = 8  # tokens


def scaled(config: Any, tp: int, stages: int = 1, even: bool = False, ep: int = 1, etp: int = 1) -> Any:
    """A config of `transformers` with small asymmetric sizes, for `tp` ranks and this number of pipeline stages.

    even: whether tp divides the vocabulary. ep, etp: over how many ranks experts are divided, and each of them.
    """
    small = copy.deepcopy(config)
    _scale_layers(small, stages)
    heads, head_width, hidden = _scale_heads(small, tp)
    scale_latent_heads(small, head_width)
    _scale_scan(small, config, hidden, tp)
    _scale_chunks(small)
    _scale_inner(small, tp, heads * head_width, hidden)
    scale_experts(small, config, tp, ep, etp)
    _scale_vocabulary(small, tp, even)
    _scale_positions(small, config, head_width, tp)
    return small


def _field_of(config: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    """(name, value) of the first of these fields that the config has; ("", None) if it has none."""
    for name in names:
        field = getattr(config, "attribute_map", {}).get(name, name)
        if vars(config).get(field) is not None:
            return field, vars(config)[field]
    return "", None


def _scale_layers(config: Any, stages: int) -> None:
    """At least three layers, one of each kind, and one for each stage. Lists with a value per layer keep those layers'
    values."""
    field, count = _field_of(config, _LAYERS)
    if not count:
        return
    kinds = _kinds_of_layers(config, count)
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    num_layers = max(3, len(chosen), stages)
    chosen += [index for index in range(count) if index not in chosen][: max(0, num_layers - len(chosen))]
    chosen = sorted(chosen)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count and name != field:
            setattr(config, name, [value[index] for index in chosen])
    setattr(config, field, len(chosen))
    if shared := _num_shared(config):
        setattr(config, _SHARED, sum(index >= count - shared for index in chosen))
    for name in ("max_window_layers", "first_k_dense_replace"):
        if isinstance(value := vars(config).get(name), int) and value > 1:
            setattr(config, name, 1)


def _kinds_of_layers(config: Any, count: int) -> list[tuple[Any, ...]]:
    """For each layer what its attention and its MLP are, where the config lists them, and whether it has keys and
    values of its own."""
    lists = (getattr(config, name, None) for name in ("layer_types", "mlp_layer_types"))
    listed = [kinds for kinds in lists if isinstance(kinds, (list, tuple)) and len(kinds) == count]
    if shared := _num_shared(config):  # the last ones have those of a layer before them
        listed.append([index >= count - shared for index in range(count)])
    return list(zip(*listed, strict=True)) if listed else [()] * count


def _num_shared(config: Any) -> int:
    shared = vars(config).get(_SHARED)
    return shared if type(shared) is int else 0


def _scale_heads(config: Any, tp: int) -> tuple[int, int, int]:
    """Scale heads and hidden size. Returns (heads, width of a head, hidden size)."""
    field, heads = _field_of(config, _HEADS)
    hidden_field, hidden = _field_of(config, _HIDDEN)
    if not field or not hidden_field:
        return 1, 1, hidden or 1
    kv_field, kv_heads = _field_of(config, _KV_HEADS)
    head_dim = vars(config).get("head_dim")
    fills_hidden = head_dim is None or head_dim * heads == hidden
    few_heads, few_kv = _fewer(heads, kv_heads or heads, tp)
    packed = tp * _PACKED.get(getattr(config, "model_type", ""), 1)
    if not kv_field and heads % packed == 0:
        few_heads = -(-few_heads // packed) * packed
    rotated = _rotated_share(config, head_dim or hidden // heads)
    is_partial = 0 < (_field_of(config, _PARTIAL)[1] or 1) < 1 or _has_partial(config) or 0 < rotated < 1
    width = 16 if is_partial else 6
    small = few_heads * width if fills_hidden else few_heads * width + 2 * width + 2
    for name, value in ((field, few_heads), (hidden_field, small)):
        setattr(config, name, value)
    if kv_field:
        setattr(config, kv_field, few_kv)
    if head_dim is not None:
        config.head_dim = width
    if rotated:
        config.rotary_dim = max(2, int(width * rotated) // 2 * 2)
    if vars(config).get("word_embed_proj_dim"):
        config.word_embed_proj_dim = small if config.word_embed_proj_dim == hidden else small + 6
    return few_heads, width, small


def _rotated_share(config: Any, width: int) -> float:
    """The part of a head's channels that is rotated, where a config counts them; 0: it does not."""
    rotated = vars(config).get(_ROTATED)
    return min(1.0, rotated / width) if type(rotated) is int else 0.0


def _scale_chunks(config: Any) -> None:
    """Tokens of a scan that are computed at a time: fewer than a sequence has, which they would be padded to
    otherwise."""
    if not any(name in vars(config) for name in _STATES):
        return
    for name in _CHUNKS:
        if type(value := vars(config).get(name)) is int:
            setattr(config, name, min(value, _CHUNK))


def _scale_scan(config: Any, real: Any, hidden: int, tp: int) -> None:
    """Scale the heads of a scan (Mamba 2) whose widths add up to a multiple of the hidden size."""
    expand, heads, width = (vars(real).get(name) for name in ("mamba_expand", "mamba_n_heads", "mamba_d_head"))
    if not heads or not expand or not isinstance(width, int) or heads * width != expand * _field_of(real, _HIDDEN)[1]:
        return
    few = 2 * tp
    if heads % tp or expand * hidden % few or (vars(config).get("mamba_n_groups") or 1) != 1:
        return
    config.mamba_n_heads, config.mamba_d_head = few, expand * hidden // few


def _has_partial(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return isinstance(rope, dict) and 0 < rope.get("partial_rotary_factor", 1) < 1


def _fewer(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """(heads, key/value heads) with the ratio of the real ones. tp divides them where it divides the real ones."""
    ratio = max(1, heads // kv_heads)
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return heads, kv_heads  # the real model cannot be sharded; this one must fail in the same way
    if kv_heads < tp:
        few = kv_heads
        ratio = ratio if heads <= 64 else next(r for r in range(2, ratio + 1) if few * r % tp == 0)
        return few * ratio, few
    few = tp * min(2, kv_heads // tp)  # two for each rank where the real model has at least two
    return few * min(ratio, 4 if tp < 8 else 2), few


def _scale_inner(config: Any, tp: int, heads_width: int, hidden: int) -> None:
    """An MLP width that tp divides where it divides the real one, and that no other width equals."""
    field, inner = _field_of(config, _INNER)
    if not field and "n_inner" in vars(config):  # GPT-2: None means four times the hidden size
        field, inner = "n_inner", 4 * hidden
    if not field:
        return
    step = max(hidden, heads_width) // tp // 2 * 2 + 3
    if isinstance(inner, (list, tuple)):  # of each layer
        order = list(dict.fromkeys(inner))
        few = [tp * (step + 2 * index) + (1 if width % tp else 0) for index, width in enumerate(order)]
        setattr(config, field, type(inner)(few[order.index(width)] for width in inner))
        return
    small = tp * step if inner % tp == 0 else tp * step + 1
    for name, value in list(vars(config).items()):
        if value == inner and (name == field or name.endswith("intermediate_size")):
            setattr(config, name, small)
    setattr(config, field, small)


def _scale_vocabulary(config: Any, tp: int, even: bool) -> None:
    if not isinstance(vars(config).get("vocab_size"), int):
        return
    size = -(-VOCABULARIES[0] // tp) * tp if even else _undivided(VOCABULARIES, tp)
    if vars(config).get("decoder_vocab_size") == config.vocab_size:
        config.decoder_vocab_size = size
    if type(of_layers := vars(config).get(_OF_LAYERS)) is int:  # tokens above it have no input of a layer's own
        setattr(config, _OF_LAYERS, size if of_layers >= config.vocab_size else size - 6)
    config.vocab_size = size
    for index, name in enumerate(sorted(vars(config))):
        value = vars(config)[name]
        if name.endswith("_token_id") and isinstance(value, int) and value >= size:
            setattr(config, name, index % size)
        elif name.endswith("_token_id") and isinstance(value, (list, tuple)):
            setattr(config, name, value[0] % size)


def _scale_positions(config: Any, real: Any, head_width: int, tp: int) -> None:
    """Scale learned position tables, windows, and lists of rotary factors, which have one for each pair of channels."""
    for name in ("sliding_window", "attention_window"):
        if isinstance(vars(config).get(name), int):
            setattr(config, name, WINDOW)
    rope = vars(config).get("rope_parameters") or vars(config).get("rope_scaling")
    if isinstance(vars(config).get("max_source_positions"), int):  # frames of sound, which are all there at each call
        config.max_source_positions = min(config.max_source_positions, _FRAMES)
    patch, image = vars(config).get("patch_size"), vars(config).get("image_size")
    if isinstance(patch, int) and isinstance(image, int):
        config.image_size = min(image, _PATCHES * patch)
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if isinstance(value := vars(config).get(name), int) and not rope:
            setattr(config, name, min(value, max(POSITIONS, 2 * tp)))
    if isinstance(rope, dict):
        pairs = int(head_width * (_field_of(config, _PARTIAL)[1] or rope.get("partial_rotary_factor") or 1)) // 2
        for key, value in rope.items():
            if key == "mrope_section":  # pairs for time, height and width
                rope[key] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
            elif isinstance(value, (list, tuple)) and len(value) > pairs:
                rope[key] = list(value)[:pairs]


def sequence_length(tp: int) -> int:
    """A length that tp does not divide: odd, longer than the windows, and not the number of rows."""
    return _undivided((11, 13, 17), tp)


def even_length(tp: int) -> int:
    """A length that tp divides, longer than the windows."""
    return -(-12 // tp) * tp


def _undivided(sizes: tuple[int, ...], tp: int) -> int:
    """The first of these sizes, or of the next odd number, that tp does not divide."""
    return next(size for size in (*sizes, sizes[-1] + 2) if size % tp or tp == 1)


# -- weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def perturb(model: nn.Module, seed: int, gain: float = 1.0) -> None:
    """Move 1-D parameters away from ones and zeros, and scale matrices up so that no term is negligible.

    Norm weights of one and biases of zero hide permutations and missing terms; weights of 0.02 in a small model make
    them smaller than rounding. A matrix that begins smaller than its siblings of the same shape stays so: attention
    whose scale is in the initial queries (T5) has logits so large without it that its softmax has one element, whose
    gradients are of rounding. None stays smaller than a twentieth of them: its term would be negligible.

    gain: what the deviations of matrices are multiplied by; below 1, larger ones become smaller too, and batch norms,
    which divide by
        the deviation of a few values, get an epsilon of the rest.
    """
    for module in model.modules() if gain < 1 else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = max(module.eps, 1 - gain)
    ratios = _ratios_to_siblings(model)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():  # codes of a quantized weight
            continue
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim < 2 or parameter.numel() == 1:  # a gate that begins as [[0]] would hide all that it scales
            parameter.add_(0.3 * noise.to(parameter.device))
            continue
        target_std = gain * min(1.0, 1.2 * parameter.shape[-1] ** -0.5) * ratios.get(name, 1.0)
        std = float(parameter.std())
        if 0 < std < target_std or (gain < 1 and std > target_std):
            parameter.mul_(target_std / std)
        elif std == 0:
            parameter.add_(target_std * noise.to(parameter.device))
    _fill_padding(model, generator)


def _fill_padding(model: nn.Module, generator: torch.Generator) -> None:
    """Rows of padding begin as zeros, at which a norm has no gradient, and the forward of a token that is drawn would
    be hidden."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.is_floating_point():
            row = module.weight[module.padding_idx]
            if not row.any():
                noise = torch.randn(row.shape, generator=generator).to(row.dtype)
                row.add_(float(module.weight.std()) * noise.to(row.device))


def _ratios_to_siblings(model: nn.Module) -> dict[str, float]:
    """The standard deviation of linears' weights relative to the largest among siblings of the same shape, where it is
    smaller."""
    groups: dict[tuple[str, torch.Size], dict[str, float]] = defaultdict(dict)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() > 1:
            groups[name.rpartition(".")[0], module.weight.shape][f"{name}.weight"] = float(module.weight.std())
    ratios: dict[str, float] = {}
    for group in groups.values():
        largest = max(group.values())
        ratios |= {
            name: max(std / largest, _SMALLEST_RATIO)
            for name, std in group.items()
            if 0 < std < _CLEARLY_SMALLER * largest
        }
    return ratios


_CLEARLY_SMALLER = 0.6  # the deviations of small matrices of the same initialization differ by less
_SMALLEST_RATIO = 0.05


def let_inputs_require_gradients(model: nn.Module) -> None:
    """Turn off what fails where inputs require gradients: models of sound set that flag on what they make of their
    input.

    They do so for recomputation, which passes no gradient on where no input requires one.
    """
    for module in model.modules():
        if vars(module).get("_requires_grad") is True:
            setattr(module, "_requires_grad", False)  # noqa: B010 - mypy: not every module has it


# -- scale experts ---------------------------------------------------------------------------------------------------
# The part of a scaled config that experts and latent attention need: fewer experts, narrower ones, narrower heads.
# What stays: how many experts a group has to the number of groups' choices, whether `ep` and `tp` divide the experts
# and their width, and the ratios of the widths of a latent attention. Fields that are small stay as they are.


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
    """Scale the number of experts, of their groups and choices, and the widths that `scaled` has left as they are in
    `real`."""
    for name in COUNTS:
        if type(count := vars(config).get(name)) is int and count > _MANY:
            setattr(config, name, _fewer_experts(config, count, ep))
    _scale_widths(config, real, lcm(tp, etp))


def _fewer_experts(config: Any, count: int, ep: int) -> int:
    """A number of experts that `ep` and the groups divide where they divide `count`, with two experts for each rank or
    group."""
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
    """Widths of experts and shared experts: equal ones stay equal, others differ from each other and from all other
    sizes."""
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
