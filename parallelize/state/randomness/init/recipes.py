"""From a recording to the distributions of each parameter: fills of boxes, later ones over earlier ones.

Recognized are ops that fill (`normal_`, `uniform_`, `zero_`, `fill_`, `trunc_normal_`, `randn`, `zeros`, ...), ops that scale
and shift by a number, and copies. A parameter that is computed without drawing (a table, an identity) is computed by running
its ops. Everything else is `Unknown`, with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.state.randomness.init.distributions import Constant, Distribution, Normal, TruncatedNormal, Uniform
from parallelize.state.randomness.init.recorder import InitRecording, RecordedOp, View

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Fill:
    """A distribution over a box of the full tensor."""

    box: Box
    distribution: Distribution


@dataclass(frozen=True)
class Fills:
    """Fills in order; the first covers the full tensor."""

    fills: tuple[Fill, ...]


@dataclass(frozen=True)
class Computed:
    """Computed without drawing: the recorded ops are run on real tensors."""


@dataclass(frozen=True)
class Unknown:
    """Not recognized, with the reason."""

    reason: str


Initialization = Fills | Computed | Unknown


@dataclass
class Recipe:
    """How stock PyTorch initializes a model.

    Attributes:
        recording: every op of the initialization.
        views: the view in the recording of each parameter and buffer, by each of its names.
    """

    recording: InitRecording
    views: dict[str, View]

    def __deepcopy__(self, memo: dict) -> Recipe:
        return self

    def read(self) -> dict[str, Initialization]:
        """How each parameter and buffer is initialized."""
        reader = _Reader(self.recording)
        return {name: reader.read(view) for name, view in self.views.items()}


class _Reader:
    def __init__(self, recording: InitRecording):
        self.ops = recording.by_storage()
        self.order = {id(op): index for index, op in enumerate(recording.ops)}

    def read(self, tensor: View) -> Initialization:
        ops = self.ops.get(tensor.storage, [])
        if not any(op.name not in _EMPTY for op in ops):
            return Unknown("nothing fills it")
        fills = self._fills(tensor, ops)
        if isinstance(fills, Unknown) and not self._draws(tensor.storage):
            return Computed()
        return fills

    def _fills(self, tensor: View, ops: list[RecordedOp]) -> Fills | Unknown:
        fills: list[Fill] = []
        for op in ops:
            fills_after = self._after(op, tensor, fills)
            if isinstance(fills_after, Unknown):
                return fills_after
            fills = fills_after
        full = tuple(slice(0, size) for size in tensor.size)
        return Fills(tuple(fills)) if fills and fills[0].box == full else Unknown("a part of it is never filled")

    def _after(self, op: RecordedOp, tensor: View, fills: list[Fill]) -> list[Fill] | Unknown:
        """The fills of a tensor after this op."""
        if op.name in _EMPTY:
            return []
        target = op.out if op.name in _MAKES or not op.args else op.args[0]
        box = _box(target, tensor) if isinstance(target, View) else None
        if box is None:
            return Unknown(f"{op.name} fills a part of it that is no block")
        is_full = box == tuple(slice(0, size) for size in tensor.size)
        filled = _filled(op)
        if filled is not None:
            return [Fill(box, filled)] if is_full else [*fills, Fill(box, filled)]
        scaled = _scaled(op)
        if scaled is not None and is_full and fills:
            return [Fill(fill.box, fill.distribution.affine(*scaled)) for fill in fills]
        if op.name in _COPIES and is_full:
            return self._copied(op, tensor)
        return Unknown(f"{op.name} computes it")

    def _copied(self, op: RecordedOp, tensor: View) -> list[Fill] | Unknown:
        """The fills after an op that copies another tensor of the same shape, possibly scaled."""
        same = op.name in ("copy_", "clone", "_to_copy")
        source = op.args[1] if op.name == "copy_" else op.args[0]
        if not isinstance(source, View) or source.size != tensor.size or not (same or _is_affine(op)):
            return Unknown(f"{op.name} computes it")
        before = self.order[id(op)]
        ops = [other for other in self.ops.get(source.storage, ()) if self.order[id(other)] < before]
        if all(other.name in _EMPTY for other in ops):  # the copy is as empty, and is filled after it
            return []
        copied = self._fills(source, ops)
        if isinstance(copied, Unknown):
            return copied
        scale, shift = (1.0, 0.0) if same else _affine(op)
        return [Fill(fill.box, fill.distribution.affine(scale, shift)) for fill in copied.fills]

    def _draws(self, storage: int) -> bool:
        """Whether the content of a storage depends on random numbers."""
        pending, seen = [storage], set()
        while pending:
            current = pending.pop()
            seen.add(current)
            for op in self.ops.get(current, ()):
                if op.random:
                    return True
                pending += [other for other in op.reads if other not in seen]
        return False


_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_FACTORIES: dict[str, Distribution] = {
    "zeros": Constant(0.0),
    "zeros_like": Constant(0.0),
    "new_zeros": Constant(0.0),
    "ones": Constant(1.0),
    "ones_like": Constant(1.0),
    "new_ones": Constant(1.0),
    "rand": Uniform(),
    "rand_like": Uniform(),
    "randn": Normal(),
    "randn_like": Normal(),
}
_OUT_OF_PLACE = {"mul", "div", "add", "sub", "neg"}
_COPIES = {*_OUT_OF_PLACE, "copy_", "clone", "_to_copy"}
_MAKES = {*_FACTORIES, *_OUT_OF_PLACE, "full", "full_like", "new_full", "clone", "_to_copy"}


def _filled(op: RecordedOp) -> Distribution | None:
    """The distribution with which an op fills its target, whatever its previous content; None for other ops."""
    arguments = op.args
    if op.name in _FACTORIES:
        return _FACTORIES[op.name]
    if op.name == "zero_":
        return Constant(0.0)
    if op.name in ("fill_", "full", "full_like", "new_full"):
        value = arguments[-1]
        return Constant(float(value)) if isinstance(value, (int, float)) else None
    if op.name == "uniform_":
        return Uniform(*_numbers(arguments[1:3], (0.0, 1.0)))
    if op.name == "normal_":
        return Normal(*_numbers(arguments[1:3], (0.0, 1.0)))
    if op.name == "trunc_normal_":
        return TruncatedNormal(*arguments[1:5])
    return None


def _numbers(arguments: tuple, default: tuple[float, ...]) -> tuple[float, ...]:
    return (*arguments, *default[len(arguments) :])


def _scaled(op: RecordedOp) -> tuple[float, float] | None:
    """(scale, shift) of an in-place op with a number; None for other ops."""
    in_place = op.name.endswith("_") and op.name[:-1] in _OUT_OF_PLACE
    return _affine(op) if in_place and _is_affine(op) else None


def _is_affine(op: RecordedOp) -> bool:
    return all(isinstance(value, (int, float)) for value in op.args[1:])


def _affine(op: RecordedOp) -> tuple[float, float]:
    arguments, name = op.args, op.name.rstrip("_")
    value = float(arguments[1]) if len(arguments) > 1 else 0.0
    if name in ("add", "sub"):
        value *= float(op.kwargs.get("alpha", 1)) * (1 if name == "add" else -1)
    return {"mul": (value, 0.0), "div": (1.0 / value if value else 0.0, 0.0), "neg": (-1.0, 0.0)}.get(
        name, (1.0, value)
    )


def _box(view: View, tensor: View) -> Box | None:
    """The block of a tensor that a view of the same storage covers; None if it covers no block.

    Compares offsets and strides: along each dim of the tensor, the view has an interval or a single index.
    """
    offset, box, dims = view.offset - tensor.offset, [], list(zip(view.size, view.stride, strict=True))
    if view.dtype != tensor.dtype or offset < 0:
        return None
    for size, stride in zip(tensor.size, tensor.stride, strict=True):
        start = min(offset // stride, max(size - 1, 0)) if stride else 0
        offset -= start * stride
        length = dims.pop(0)[0] if dims and (dims[0][1] == stride or dims[0][0] == size == 1) else 1
        if start + length > size:
            return None
        box.append(slice(start, start + length))
    return None if dims or offset else tuple(box)
