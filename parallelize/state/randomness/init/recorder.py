"""Record initializers on the meta device: every op that fills or changes a tensor, in order.

A recording identifies tensors by storage, so views, `.data` and `nn.Parameter` need no bookkeeping: an op on a view is an op
on a part of a storage. `recipes` reads distributions from a recording; `stock_generator` runs it on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private


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
        out = _filled(func, args, kwargs, run) if fills else run()
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


def _filled(func: Any, args: tuple, kwargs: dict, run: Callable[[], Any]) -> Any:
    """The result of an op that fills its first argument with random numbers. On meta PyTorch would take a millisecond for it.

    One number is drawn in its place, which checks the dtype and the other arguments, where the CPU has a kernel for the dtype.
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

    Libraries that skip initialization on the meta device check the device of an empty tensor; that tensor reports the device
    that it would have outside the context.
    """
    recorder = Recorder()
    with private.record_ops(recorder.op), private.on_meta(), private.truncated_normals(recorder.truncated):
        yield recorder
