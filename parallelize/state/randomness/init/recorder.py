"""Record initializers on the meta device: every op that fills or changes a tensor, in order.

A recording identifies tensors by storage, so views, `.data` and `nn.Parameter` need no bookkeeping: an op on a view is
an op on a part of a storage. `recipes` reads distributions from a recording; `stock_generator` runs it on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize.base.boxes import Box, full_box
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.randomness.init.distributions import Constant, Distribution, Normal, TruncatedNormal, Uniform


@dataclass(frozen=True)
class View:
    """A tensor as a view of a storage: element offset, sizes and strides."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.size:
            count *= size
        return count


@dataclass(frozen=True)
class RecordedOp:
    """One op.

    Attributes:
        name, call, args, kwargs, out: the call and its result, with `View`s in place of meta tensors.
        writes: the storages that it fills or changes.
        reads: the storages of its inputs.
        random: whether it draws random numbers.
    """

    name: str
    call: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    writes: frozenset[int]
    reads: frozenset[int]
    random: bool


@dataclass
class InitRecording:
    """All ops, and the size in bytes of every storage that they use."""

    ops: list[RecordedOp] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> InitRecording:
        return self

    def by_storage(self) -> dict[int, list[RecordedOp]]:
        """Storage -> the ops that write to it, in order."""
        writers: dict[int, list[RecordedOp]] = {}
        for op in self.ops:
            for storage in op.writes:
                writers.setdefault(storage, []).append(op)
        return writers


class Recorder:
    """Records ops, and maps tensors to their views.

    Storages stay alive while recording, so that no address is used twice; on the meta device they take no memory.
    """

    def __init__(self) -> None:
        self.recording = InitRecording()
        self._alive: dict[int, torch.Tensor] = {}

    def view(self, tensor: torch.Tensor) -> View:
        address = private.storage_address(tensor)
        if address not in self._alive:
            self._alive[address] = tensor.detach()
            self.recording.nbytes[address] = tensor.untyped_storage().nbytes()
        return View(address, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def knows(self, tensor: torch.Tensor) -> bool:
        return private.storage_address(tensor) in self._alive

    def op(self, func: Any, args: tuple, kwargs: dict, run: Callable[[], Any]) -> Any:
        """Run one dispatched op, and record it if it creates or changes meta tensors."""
        inputs = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        reads = frozenset(self.view(tensor).storage for tensor in inputs if tensor.is_meta)
        written = {
            self.view(tensor).storage for tensor in private.written_tensors(func, args, kwargs) if tensor.is_meta
        }
        fills = random and bool(written) and len(inputs) == 1 and inputs[0] is args[0] and not kwargs.get("generator")
        out = _recorded_fill(func, args, kwargs, run) if fills else run()
        outputs = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if random and not all(tensor.is_meta for tensor in [*inputs, *outputs]):
            raise _real_draw(str(func))
        created = {self.view(tensor).storage for tensor in outputs if tensor.is_meta and not self.knows(tensor)}
        if created or written:
            self._add(func.overloadpacket.__name__, func, (args, kwargs, out), created | written, reads, random)
        return out

    def truncated(self, tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
        """`trunc_normal_` as one recorded op: it reads the values that it drew, so it cannot run on meta."""
        if not tensor.is_meta:
            raise _real_draw("trunc_normal_")
        storage = frozenset({self.view(tensor).storage})
        arguments = (tensor, mean, std, low, high)
        self._add("trunc_normal_", torch.nn.init.trunc_normal_, (arguments, {}, None), storage, storage, True)
        return tensor

    def _add(self, name: str, call: Callable, values: tuple, writes: Set[int], reads: Set[int], random: bool) -> None:
        """Add an op, with views in place of the meta tensors of its arguments, keyword arguments and result."""
        args, kwargs, out = self._as_views(values)
        self.recording.ops.append(
            RecordedOp(name, call, args, kwargs, out, frozenset(writes), frozenset(reads), random)
        )

    def _as_views(self, value: Any) -> Any:
        """A value of an op's schema, whose containers are lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            return self.view(value) if value.is_meta else value
        if isinstance(value, dict):
            return {key: self._as_views(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._as_views(inner) for inner in value]
        if isinstance(value, tuple):
            return tuple(self._as_views(inner) for inner in value)
        return value


_CHECKED = torch.Generator()


def _recorded_fill(func: Any, args: tuple, kwargs: dict, run: Callable[[], Any]) -> Any:
    """The result of an op that fills its first argument with random numbers. On meta PyTorch would take a millisecond
    for it.

    One number is drawn in its place, which checks the dtype and the other arguments, where the CPU has a kernel for the
    dtype.
    """
    one_number = torch.empty(1, dtype=args[0].dtype, device="cpu")
    try:
        func(one_number, *args[1:], **{**kwargs, "generator": _CHECKED})
    except NotImplementedError:
        return run()
    return args[0]


def _real_draw(name: str) -> ModelError:
    return ModelError(
        Problem(
            "unrecordable-initialisation",
            f"{name} draws real numbers while the initialization is being recorded",
            fix="leave out `device=` in that call, so that it runs on the meta device; or give `rules`",
        )
    )


@contextmanager
def record_initialization() -> Iterator[Recorder]:
    """A context in which new tensors are on the meta device and every op on them is recorded.

    Libraries that skip initialization on the meta device check the device of an empty tensor; that tensor reports the
    device that it would have outside the context.
    """
    recorder = Recorder()
    with private.record_ops(recorder.op), private.on_meta(), private.truncated_normals(recorder.truncated):
        yield recorder


# -- recipes ---------------------------------------------------------------------------------------------------------
# From a recording to the distributions of each parameter: fills of boxes, later ones over earlier ones. Recognized
# are ops that fill (`normal_`, `uniform_`, `zero_`, `fill_`, `trunc_normal_`, `randn`, `zeros`, ...), ops that scale
# and shift by a number, and copies. A parameter that is computed without drawing (a table, an identity) is computed
# by running its ops. Everything else is `Unknown`, with a reason.


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
        replay: `replay_stock`.
    """

    recording: InitRecording
    views: dict[str, View]
    replay: Callable[..., None]

    def __deepcopy__(self, memo: dict) -> Recipe:
        return self

    def read(self) -> dict[str, Initialization]:
        """How each parameter and buffer is initialized."""
        reader = _Reader(self.recording)
        return {name: reader.read(view) for name, view in self.views.items()}

    def constants(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The values of those of these buffers that the constructor makes without random numbers, as a causal mask."""
        reader = _Reader(self.recording)
        known = {name: reader.read(self.views[name]) for name in names if name in self.views}
        values: dict[str, torch.Tensor] = {}
        self.replay(self, [name for name, how in known.items() if _is_constant(how)], None, values.__setitem__)
        return values


def _is_constant(how: Initialization) -> bool:
    fills = how.fills if isinstance(how, Fills) else ()
    return isinstance(how, Computed) or (bool(fills) and all(isinstance(f.distribution, Constant) for f in fills))


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
            fills_after = self._fills_after(op, tensor, fills)
            if isinstance(fills_after, Unknown):
                return fills_after
            fills = fills_after
        full = full_box(tensor.size)
        return Fills(tuple(fills)) if fills and fills[0].box == full else Unknown("a part of it is never filled")

    def _fills_after(self, op: RecordedOp, tensor: View, fills: list[Fill]) -> list[Fill] | Unknown:
        """The fills of a tensor after this op."""
        if op.name in _EMPTY:
            return []
        target = op.out if op.name in _MAKES or not op.args else op.args[0]
        box = _box(target, tensor) if isinstance(target, View) else None
        if box is None:
            return Unknown(f"{op.name} fills a part of it that is no block")
        is_full = box == full_box(tensor.size)
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
        box.append((start, start + length))
    return None if dims or offset else tuple(box)
