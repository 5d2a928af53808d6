"""From a style word to its contract, for one module in its place.

Floor 1: torch-free. A module is seen through `ModuleFacts`; where it stands (inside the sequence-parallel region, inside
a module whose input is gathered) through `Place`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from parallelize.errors import ModelError, Problem
from parallelize.styles.contract import Contract, Edge, Use
from parallelize.styles.text import StyleText


@dataclass(frozen=True)
class ModuleFacts:
    """What a style needs to know of a module.

    kind: "linear" (weight [out, in]), "conv1d" (weight [in, out], as GPT-2 stores it), "embedding", "norm" or "other".
    """

    fqn: str
    kind: str
    class_name: str
    shapes: dict[str, tuple[int, ...]]  # of the parameters that the module holds itself


@dataclass(frozen=True)
class Place:
    """Where a module stands, and which modes are on."""

    sequence_parallel: bool = False  # on, and the module lies inside the region
    loss_parallel: bool = False
    fuse_loss: bool = False
    input_gathered: bool = False  # a module above it has a `gather` rule


def contract_of(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    """The contract of `style` on `module`.

    Raises: ModelError `wrong-module-for-style`.
    """
    contract = _BUILDERS[style.word](style, module, place)
    return replace(contract, overlap=style.options["overlap"]) if "overlap" in style.options else contract


def _colwise(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    out_dim, _ = _linear_dims(style, module)
    use = Use(out_dim, style.unit, style.chunks)
    bias = Use(0, style.unit, style.chunks)
    output = style.options.get("output", "shard")
    leave = Edge.NONE
    deferred = output == "vocabulary" and place.fuse_loss
    if output == "full" or (output == "vocabulary" and not place.loss_parallel and not deferred):
        leave = Edge.GATHER_LAST
    elif output == "vocabulary":
        leave = Edge.VOCABULARY
    return Contract(
        "colwise",
        _shared_input(place),
        leave,
        sequence_dim=_sequence_dim(style.options.get("input")),
        uses={name: bias if name == "bias" else use for name in module.shapes},
        compute="deferred_head" if deferred else "stock",
        local_attributes=_widths(module, out_dim),
    )


def _rowwise(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    _, in_dim = _linear_dims(style, module)
    leave = Edge.SCATTER_SEQUENCE if place.sequence_parallel else Edge.REDUCE
    return Contract(
        "rowwise",
        Edge.SPLIT_LAST if style.options.get("input") == "full" else Edge.NONE,
        leave,
        sequence_dim=_sequence_dim(style.options.get("output")),
        # the bias is added once, after the sum: under sequence parallelism each rank adds it to its own rows
        uses={
            name: Use(partial=place.sequence_parallel) if name == "bias" else Use(in_dim, style.unit)
            for name in module.shapes
        },
        compute="rowwise",
    )


def _embedding(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    _need(style, module, "embedding")
    return Contract("embedding", leave=Edge.REDUCE, uses={"weight": Use(0)}, compute="embedding")


def _embedding_colwise(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    _need(style, module, "embedding")
    return Contract("embedding_colwise", leave=Edge.GATHER_LAST, uses={"weight": Use(1)})


def _sequence(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    return Contract("sequence", uses={name: Use(partial=place.sequence_parallel) for name in module.shapes})


def _replicate(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    partial = style.options.get("gradient") == "partial"
    return Contract("replicate", uses={name: Use(partial=partial) for name in module.shapes})


def _gather(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    edge = Edge.GATHER_SEQUENCE if place.sequence_parallel else Edge.COPY
    return Contract("gather", edge, argument=style.options.get("argument", ""))


def _ulysses(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    """Its linears are whole (`sequence`): inside the region each rank runs them on its own rows."""
    split = tuple(filter(None, (name.strip() for name in style.options.get("split", "").split("+"))))
    return Contract("ulysses", compute="ulysses" if place.sequence_parallel else "stock", split=split)


def _rms_norm(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    _need(style, module, "norm")
    return Contract("rms_norm", uses={name: Use(0, style.unit) for name in module.shapes}, compute="rms_norm")


def _shard(style: StyleText, module: ModuleFacts, place: Place) -> Contract:
    use = Use(int(style.options.get("dim", "0")), style.unit, style.chunks)
    return Contract("shard", uses=dict.fromkeys(module.shapes, use))


_BUILDERS: dict[str, Callable[[StyleText, ModuleFacts, Place], Contract]] = {
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


def _shared_input(place: Place) -> Edge:
    """A column linear's input edge: none where the block gathered it for all its projections at once."""
    if place.input_gathered:
        return Edge.NONE
    return Edge.GATHER_SEQUENCE if place.sequence_parallel else Edge.COPY


def _sequence_dim(option: str | None) -> int:
    """Dim 1 of [batch, sequence, hidden]; dim 0 where the stock forward has flattened to [tokens, hidden]."""
    return 0 if option == "tokens" else 1


def _linear_dims(style: StyleText, module: ModuleFacts) -> tuple[int, int]:
    """(output dim, input dim) of the stored weight."""
    if module.kind == "conv1d":
        return 1, 0
    _need(style, module, "linear")
    return 0, 1


def _widths(module: ModuleFacts, out_dim: int) -> dict[str, str]:
    """Conv1D views its output to `nf`, so that width becomes local with the weight."""
    return {"nf": "weight"} if module.kind == "conv1d" else {}


def _need(style: StyleText, module: ModuleFacts, kind: str) -> None:
    if module.kind != kind:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"`{style.word}` needs a {kind}",
                rows=(("module", f"{module.fqn} is a {module.class_name}"), ("holds", _shapes(module))),
                fix="name the module that holds the weight, or choose another style",
            )
        )


def _shapes(module: ModuleFacts) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in module.shapes.items()) or "no parameters of its own"
