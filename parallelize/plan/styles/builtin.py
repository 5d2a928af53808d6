"""The styles of this package, and how each makes a contract.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.styles.contract import OVERLAPS, Contract, Conversion, Traits, Use
from parallelize.plan.styles.style import ModuleFacts, Style, StyleContext, StyleText, register_style


def _colwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    out_dim, _ = _linear_dims(style, module)
    use, bias = _use(style, out_dim), _use(style, 0)
    output = style.options.get("output", "shard")
    leave = Conversion.NONE
    deferred = output == "vocabulary" and context.fuse_loss
    if output == "full" or (output == "vocabulary" and not context.loss_parallel and not deferred):
        leave = Conversion.GATHER_LAST
    elif output == "vocabulary":
        leave = Conversion.VOCABULARY
    return Contract(
        "colwise",
        Conversion.COPY if style.options.get("input") == "full" else _shared_input(context),
        leave,
        sequence_dim=_sequence_dim(style.options.get("input")),
        feature_dim=_feature_dim(module),
        uses={name: bias if name == "bias" else use for name in module.shapes},
        compute="deferred_head" if deferred else "stock",
        local_attributes=_widths(module, out_dim),
    )


def _rowwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _, in_dim = _linear_dims(style, module)
    leave = Conversion.SCATTER_SEQUENCE if context.sequence_parallel else Conversion.REDUCE
    inside = style.options.get("gradient") == "partial"
    return Contract(
        "rowwise",
        Conversion.SPLIT_LAST if style.options.get("input") == "full" else Conversion.NONE,
        Conversion.SUM_BOTH if inside else leave,
        sequence_dim=_sequence_dim(style.options.get("output")),
        # the bias is added once, after the sum: under sequence parallelism each rank adds it to its own tokens
        uses={
            name: Use(partial=context.sequence_parallel or inside) if name == "bias" else _use(style, in_dim)
            for name in module.shapes
        },
        compute="rowwise",
    )


def _embedding(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _check_kind(style, module, "embedding")
    return Contract("embedding", leave=Conversion.REDUCE, uses={"weight": Use(0)}, compute="embedding")


def _embedding_colwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _check_kind(style, module, "embedding")
    return Contract("embedding_colwise", leave=Conversion.GATHER_LAST, uses={"weight": Use(1)})


def _sequence(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    return Contract("sequence", uses={name: Use(partial=context.sequence_parallel) for name in module.shapes})


def _replicate(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    partial = style.options.get("gradient") == "partial"
    return Contract("replicate", uses={name: Use(partial=partial) for name in module.shapes})


def _gather(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    enter = Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY
    return Contract("gather", enter, argument=style.options.get("argument", ""))


def _scan(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """As `gather`; the forward computes this rank's channels or heads, with shards of its children's parameters."""
    return replace(_gather(style, module, context), style="scan", compute="scan")


def _full_sequence(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """A module that mixes tokens and is not split by heads: each rank runs it on all tokens, so that gradients are
    full."""
    on = context.sequence_parallel
    enter, leave = (Conversion.LEAVE_REGION, Conversion.ENTER_REGION) if on else (Conversion.NONE, Conversion.NONE)
    uses = {name: Use() for name in module.shapes}
    return Contract("full_sequence", enter, leave, argument=style.options.get("argument", ""), uses=uses)


def _ulysses(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """Its linears are replicated (`sequence`): inside the region each rank runs them on its own tokens. Parameters of
    its own see those, or the rank's heads."""
    split = tuple(filter(None, (name.strip() for name in style.options.get("split", "").split("+"))))
    on = context.sequence_parallel
    uses = {name: Use(partial=on) for name in module.shapes}
    return Contract("ulysses", uses=uses, compute="ulysses" if on else "stock", split=split)


def _rms_norm(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _check_kind(style, module, "norm")
    return Contract("rms_norm", uses={name: _use(style, 0) for name in module.shapes}, compute="rms_norm")


def _channel_norm(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """Batch norm of this rank's channels, or group norm of its groups."""
    _check_kind(style, module, "channel_norm")
    return Contract("channel_norm", uses={name: _use(style, 0) for name in module.shapes}, compute="channel_norm")


def _gated_norm(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _check_kind(style, module, "norm")
    return Contract("gated_norm", uses={name: _use(style, 0) for name in module.shapes}, compute="gated_norm")


def _multihead(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """`nn.MultiheadAttention` by heads; its `out_proj` has a rule of its own."""
    packed, single = Use(0, style.unit * 3), Use(0, style.unit)
    uses = {name: packed if name.startswith("in_proj") else single for name in module.shapes}
    uses |= {name: Use(2, style.unit) for name in ("bias_k", "bias_v") if name in module.shapes}
    if not style.unit:
        fix = "name the number of heads: `multihead(heads)`, with `sizes: {heads: 8}`"
        raise ModelError(Problem("missing-unit", f"`multihead` of {module.fqn} names no heads", fix=fix))
    return Contract("multihead", _shared_input(context), uses=uses, compute="multihead")


def _experts(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """The stacked experts of a mixture: whole ones on each rank, or each split over its inner width, as a dense MLP
    is."""
    if style.options.get("tokens") == "all":
        return _dense_experts(module, context)
    if module.inner:
        return inner_experts(module, context)
    _check_kind(style, module, "experts")
    if context.sends_tokens:
        return replace(_divided_experts(module, context), beside=style.options.get("beside", ""))
    enter = Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY
    leave = Conversion.SCATTER_SEQUENCE if context.sequence_parallel else Conversion.REDUCE
    return Contract("experts", enter, leave, sequence_dim=0, uses=_split_experts(module), compute="experts")


def _dense_experts(module: ModuleFacts, context: StyleContext) -> Contract:
    """Every expert gets every token, scaled before: [experts x tokens, hidden], with weights [experts, in, out], gate
    before up."""
    shapes = [module.shapes.get(name, ()) for name in _DENSE]
    if module.shapes.keys() != _DENSE.keys() or [len(shape) for shape in shapes] != [3, 3]:
        what = (
            f"{module.fqn} does not have gate_up_proj [experts, hidden, 2 x inner] and down_proj [experts, inner, "
            "hidden]"
        )
        raise ModelError(Problem("experts-not-splittable", what, rows=(("parameters", _shapes(module)),)))
    if context.sends_tokens:
        split = {name: replace(use, by_expert=True) for name, use in _DENSE.items()}
        whole = dict.fromkeys(_DENSE, Use(0, by_expert=True))
        return _sends_tokens(whole if context.etp == 1 else split, context, "scaled experts")
    enter = Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY
    leave = Conversion.SCATTER_SEQUENCE if context.sequence_parallel else Conversion.REDUCE
    return Contract("experts", enter, leave, sequence_dim=0, uses=dict(_DENSE), compute="dense experts")


_DENSE = {"gate_up_proj": Use(2, chunks=2), "down_proj": Use(1)}


def _divided_experts(module: ModuleFacts, context: StyleContext) -> Contract:
    """Experts divided over `ep` along the first dim, whole ones or each split over `etp`.

    Each rank sends its own tokens. Where all ranks of `tp` have the same tokens, each takes a part of them.
    """
    uses = _whole_experts(module) if context.etp == 1 else _split_divided_experts(module)
    return _sends_tokens(uses, context, "whole experts")


def _sends_tokens(uses: dict[str, Use], context: StyleContext, compute: str) -> Contract:
    enter, leave = (Conversion.NONE, Conversion.NONE) if context.sequence_parallel else _BY_TOKENS
    local = {"num_experts": "down_proj"}
    return Contract("experts", enter, leave, sequence_dim=0, uses=uses, compute=compute, local_attributes=local)


_BY_TOKENS = (Conversion.SPLIT_TOKENS, Conversion.GATHER_TOKENS)


def _whole_experts(module: ModuleFacts) -> dict[str, Use]:
    """What is stacked is divided along its first dim; each rank sees a part of the gradient of anything else."""
    count = module.shapes["down_proj"][0] if "down_proj" in module.shapes else 0
    stacked = Use(0, by_expert=True)
    return {name: stacked if shape[0] == count else Use(partial=True) for name, shape in module.shapes.items()}


def _split_divided_experts(module: ModuleFacts) -> dict[str, Use]:
    """As `_split_experts`; the second bias is split over the output's width, of which each rank adds its part."""
    uses = _split_experts(module) | ({"down_proj_bias": Use(1)} if "down_proj_bias" in module.shapes else {})
    return {name: replace(use, by_expert=True) for name, use in uses.items()}


def _split_experts(module: ModuleFacts) -> dict[str, Use]:
    """Each expert split over its inner width, as flags of the instance say that it is stored.

    The second bias is added by the first rank alone, so that its gradient is a sum over ranks.
    """
    flags = module.flags
    if flags["has_post_expert_norm"]:
        what = f"{module.fqn} normalizes the output of each expert, which no rank has where experts are split inside"
        raise ModelError(
            Problem("experts-not-splittable", what, fix="ep=N, the size of tp, with etp=1; or `replicate` for it")
        )
    out_dim, in_dim = (2, 1) if flags["is_transposed"] else (1, 2)
    chunks, adjacent = (1, 1) if not flags["has_gate"] else (2, 1) if flags["is_concatenated"] else (1, 2)
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    uses = {
        first: Use(out_dim, chunks=chunks, adjacent=adjacent),
        f"{first}_bias": Use(1, chunks=chunks, adjacent=adjacent),
        "down_proj": Use(in_dim),
        "down_proj_bias": Use(partial=True),
    }
    if unknown := sorted(module.shapes.keys() - uses.keys()):
        what = f"{module.fqn} has parameters that stacked experts do not have: {', '.join(unknown)}"
        raise ModelError(Problem("experts-not-splittable", what, rows=(("parameters", _shapes(module)),)))
    return {name: use for name, use in uses.items() if name in module.shapes}


def _shard(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    use = _use(style, int(style.options.get("dim", "0")))
    return Contract("shard", uses=dict.fromkeys(module.shapes, use), local_attributes=_groups(module))


def _use(style: StyleText, dim: int) -> Use:
    return Use(dim, style.unit, style.chunks, widths=style.widths if any(style.widths) else ())


def _groups(module: ModuleFacts) -> dict[str, str]:
    """A rank has as large a part of a convolution's groups as of its channels."""
    return {"groups": "weight"} if module.kind in ("depthwise", "grouped") else {}


def _shared_input(context: StyleContext) -> Conversion:
    """How a column linear converts its input: not at all where the block gathers it once for all its projections."""
    if context.input_gathered:
        return Conversion.NONE
    return Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY


def _sequence_dim(option: str | None) -> int:
    """Dim 1 of [batch, sequence, hidden]; dim 0 where the stock forward has flattened to [tokens, hidden]."""
    return 0 if option == "tokens" else 1


def _feature_dim(module: ModuleFacts) -> int:
    """The last dim; of a convolution, whose weight is [out, in, *kernel], that of the channels."""
    return 1 - len(module.shapes["weight"]) if module.kind == "convolution" else -1


def _linear_dims(style: StyleText, module: ModuleFacts) -> tuple[int, int]:
    """(output dim, input dim) of the stored weight."""
    if module.kind == "conv1d":
        return 1, 0
    if module.kind == "convolution":
        _check_channels(style, module)
        return 0, 1
    _check_kind(style, module, "linear")
    return 0, 1


def _check_channels(style: StyleText, module: ModuleFacts) -> None:
    """Channels are dim 1, and nothing splits them at a boundary."""
    gathers = style.options.get("output") in ("shard", "full")
    if options := sorted(style.options.keys() & {"input", "overlap", *([] if gathers else ["output"])}):
        what = f"`{style.word}` of {module.fqn}, a {module.class_name}, takes no option {', '.join(options)}"
        fix = (
            "a column convolution whose result goes to a row convolution or is gathered (`output=full`), or `replicate`"
        )
        raise ModelError(Problem("wrong-module-for-style", what, fix=fix))


def _widths(module: ModuleFacts, out_dim: int) -> dict[str, str]:
    """Conv1D views its output to the width `nf`, and forwards of convolutions that are not PyTorch's may read
    `out_channels`: these are set to the local width of the weight."""
    if module.kind == "convolution" and module.class_name not in ("Conv1d", "Conv2d", "Conv3d"):
        return {"out_channels": "weight"}
    return {"nf": "weight"} if module.kind == "conv1d" else {}


def _check_kind(style: StyleText, module: ModuleFacts, kind: str) -> None:
    if module.kind != kind:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"`{style.word}` needs a {kind}",
                rows=(("module", f"{module.fqn} is a {module.class_name}"), ("parameters", _shapes(module))),
                fix="name the module that owns the weight, or choose another style",
            )
        )


def _shapes(module: ModuleFacts) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in module.shapes.items()) or "none"


_LINEAR = {"unit": None, "overlap": OVERLAPS}
for _style in (
    Style(
        "colwise",
        _colwise,
        {**_LINEAR, "chunks": None, "input": ("tokens", "full"), "output": ("shard", "full", "vocabulary")},
        "unit",
        Traits(splits_output=True),
    ),
    Style(
        "rowwise",
        _rowwise,
        {**_LINEAR, "chunks": None, "input": ("shard", "full"), "output": ("tokens",), "gradient": ("full", "partial")},
        "unit",
        Traits(sums_output=True),
    ),
    Style("embedding", _embedding, traits=Traits(looks_up=True)),
    Style("embedding_colwise", _embedding_colwise),
    Style("sequence", _sequence, traits=Traits(replicates=True, by_token=True)),
    Style(
        "replicate",
        _replicate,
        {"gradient": ("full", "partial")},
        traits=Traits(replicates=True, for_parameters=True),
    ),
    Style(
        "gather",
        _gather,
        {"argument": None, "overlap": OVERLAPS},
        "argument",
        Traits(shares_input=True, keeps_layout=True),
    ),
    Style("scan", _scan, {"argument": None}, "argument", Traits(shares_input=True, reads_shards=True)),
    Style("channel_norm", _channel_norm, {"unit": None}, "unit", Traits(keeps_layout=True)),
    Style("gated_norm", _gated_norm, {"unit": None}, "unit", Traits(keeps_layout=True)),
    Style(
        "full_sequence",
        _full_sequence,
        {"argument": None},
        "argument",
        Traits(replicates=True, sees_full=True),
    ),
    Style("ulysses", _ulysses, {"split": None}, "split", Traits(keeps_layout=True)),
    Style("multihead", _multihead, {"unit": None}, "unit", Traits(keeps_layout=True)),
    Style("experts", _experts, {"tokens": ("chosen", "all"), "beside": None}),
    Style("rms_norm", _rms_norm, {"unit": None}, "unit", Traits(keeps_layout=True)),
    Style(
        "shard",
        _shard,
        {"dim": None, "unit": None, "chunks": None},
        "dim",
        Traits(keeps_layout=True, for_parameters=True),
    ),
):
    register_style(_style)


# -- inner expert style ----------------------------------------------------------------------------------------------
# The contract of `experts` whose weights are in modules inside of the one that computes with them. Its uses name
# these weights from that module, such as `mlp.w1`. Torch-free.


def inner_experts(module: ModuleFacts, context: StyleContext) -> Contract:
    """Whole experts on each rank, or each split over its inner width. Tokens [N, hidden] are converted, flattened.

    A router inside chooses for this rank's tokens, as one outside does. A bias of the sum over experts is added to
    these.
    """
    uses, on = _uses(module, context), context.sequence_parallel
    uses |= {name: Use(partial=on) for name in module.shapes}
    if context.sends_tokens:
        enter, leave = (Conversion.NONE, Conversion.NONE) if on else (Conversion.SPLIT_TOKENS, Conversion.GATHER_TOKENS)
        return Contract("experts", enter, leave, sequence_dim=0, uses=uses, compute="whole experts")
    enter = Conversion.GATHER_SEQUENCE if on else Conversion.COPY
    leave = Conversion.SCATTER_SEQUENCE if on else Conversion.REDUCE
    return Contract("experts", enter, leave, sequence_dim=0, uses=uses, compute="experts")


def _uses(module: ModuleFacts, context: StyleContext) -> dict[str, Use]:
    if module.kind == "expert block":
        split = {"input_linear.weight": Use(1, chunks=2), "output_linear.weight": Use(2)}
        if not context.sends_tokens:
            return split
        return {name: replace(use if context.etp > 1 else Use(0), by_expert=True) for name, use in split.items()}
    if context.etp > 1:
        what = f"the weights of {module.fqn} are rows of one expert after another, which no rank stores as one interval"
        fix = "etp=1: whole experts over ep, or, without ep, experts split over tp"
        raise ModelError(Problem("experts-not-splittable", what, fix=fix))
    rows = Use(0, chunks=module.num_experts, by_expert=context.sends_tokens)
    return dict.fromkeys(module.inner, rows)
