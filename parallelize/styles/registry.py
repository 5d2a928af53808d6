"""From a style to its contract for one module.

A builder sees the module through `ModuleFacts`, and its surroundings (the sequence-parallel region, a gathered input, the
modes that are on) through `StyleContext`.

Floor 1: torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from parallelize.errors import ModelError, Problem
from parallelize.styles.contract import Contract, Conversion, Use
from parallelize.styles.notation import StyleText


@dataclass(frozen=True)
class ModuleFacts:
    """What a style needs to know of a module.

    Attributes:
        fqn: the module's name.
        kind: "linear" (weight [out, in]), "conv1d" (weight [in, out], as GPT-2 stores it), "embedding", "norm", "other".
        class_name: for messages.
        shapes: full shapes of its direct parameters, by name.
    """

    fqn: str
    kind: str
    class_name: str
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StyleContext:
    """The surroundings of a module, and the modes that are on.

    Attributes:
        sequence_parallel: the mode is on, and the module is inside the region.
        loss_parallel, fuse_loss: the modes of the plan.
        input_gathered: a module that contains this one has a `gather` rule.
    """

    sequence_parallel: bool = False
    loss_parallel: bool = False
    fuse_loss: bool = False
    input_gathered: bool = False


def contract_of(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """The contract of `style` on `module`.

    Raises: ModelError `wrong-module-for-style`.
    """
    contract = _BUILDERS[style.word](style, module, context)
    return replace(contract, overlap=style.options["overlap"]) if "overlap" in style.options else contract


def _colwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    out_dim, _ = _linear_dims(style, module)
    use = Use(out_dim, style.unit, style.chunks)
    bias = Use(0, style.unit, style.chunks)
    output = style.options.get("output", "shard")
    leave = Conversion.NONE
    deferred = output == "vocabulary" and context.fuse_loss
    if output == "full" or (output == "vocabulary" and not context.loss_parallel and not deferred):
        leave = Conversion.GATHER_LAST
    elif output == "vocabulary":
        leave = Conversion.VOCABULARY
    return Contract(
        "colwise",
        _shared_input(context),
        leave,
        sequence_dim=_sequence_dim(style.options.get("input")),
        uses={name: bias if name == "bias" else use for name in module.shapes},
        compute="deferred_head" if deferred else "stock",
        local_attributes=_widths(module, out_dim),
    )


def _rowwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _, in_dim = _linear_dims(style, module)
    leave = Conversion.SCATTER_SEQUENCE if context.sequence_parallel else Conversion.REDUCE
    return Contract(
        "rowwise",
        Conversion.SPLIT_LAST if style.options.get("input") == "full" else Conversion.NONE,
        leave,
        sequence_dim=_sequence_dim(style.options.get("output")),
        # the bias is added once, after the sum: under sequence parallelism each rank adds it to its own tokens
        uses={
            name: Use(partial=context.sequence_parallel) if name == "bias" else Use(in_dim, style.unit)
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


def _ulysses(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """Its linears are replicated (`sequence`): inside the region each rank runs them on its own tokens."""
    split = tuple(filter(None, (name.strip() for name in style.options.get("split", "").split("+"))))
    return Contract("ulysses", compute="ulysses" if context.sequence_parallel else "stock", split=split)


def _rms_norm(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    _check_kind(style, module, "norm")
    return Contract("rms_norm", uses={name: Use(0, style.unit) for name in module.shapes}, compute="rms_norm")


def _shard(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    use = Use(int(style.options.get("dim", "0")), style.unit, style.chunks)
    return Contract("shard", uses=dict.fromkeys(module.shapes, use))


_BUILDERS: dict[str, Callable[[StyleText, ModuleFacts, StyleContext], Contract]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "embedding": _embedding,
    "embedding_colwise": _embedding_colwise,
    "sequence": _sequence,
    "replicate": _replicate,
    "gather": _gather,
    "ulysses": _ulysses,
    "rms_norm": _rms_norm,
    "shard": _shard,
}


def _shared_input(context: StyleContext) -> Conversion:
    """How a column linear converts its input: not at all where the block gathers it once for all its projections."""
    if context.input_gathered:
        return Conversion.NONE
    return Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY


def _sequence_dim(option: str | None) -> int:
    """Dim 1 of [batch, sequence, hidden]; dim 0 where the stock forward has flattened to [tokens, hidden]."""
    return 0 if option == "tokens" else 1


def _linear_dims(style: StyleText, module: ModuleFacts) -> tuple[int, int]:
    """(output dim, input dim) of the stored weight."""
    if module.kind == "conv1d":
        return 1, 0
    _check_kind(style, module, "linear")
    return 0, 1


def _widths(module: ModuleFacts, out_dim: int) -> dict[str, str]:
    """Conv1D views its output to the width `nf`, so this attribute is set to the local width of the weight."""
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
