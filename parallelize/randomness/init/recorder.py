"""Record initializers on the meta device: every op that fills or changes a tensor, in order.

A recording identifies tensors by storage, so views, `.data` and `nn.Parameter` need no bookkeeping: an op on a view is an op
on a part of a storage. `recipes` reads distributions from a recording; `stock_generator` runs it on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parallelize.errors import ModelError, Problem
from parallelize.torch_private import torch_tensors as private


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
        reads = {self.view(tensor).storage for tensor in inputs if tensor.is_meta}
        written = {
            self.view(tensor).storage for tensor in private.written_tensors(func, args, kwargs) if tensor.is_meta
        }
        out = run()
        outputs = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if random and not all(tensor.is_meta for tensor in [*inputs, *outputs]):
            raise _real_draw(str(func))
        created = {self.view(tensor).storage for tensor in outputs if tensor.is_meta and not self.knows(tensor)}
        if created or written:
            writes = frozenset(created | written)
            name = func.overloadpacket.__name__
            self._add(RecordedOp(name, func, args, kwargs, out, writes, frozenset(reads), random))
        return out

    def truncated(self, tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
        """`trunc_normal_` as one recorded op: it reads the values that it drew, so it cannot run on meta."""
        if not tensor.is_meta:
            raise _real_draw("trunc_normal_")
        storage = frozenset({self.view(tensor).storage})
        arguments = (tensor, mean, std, low, high)
        call = torch.nn.init.trunc_normal_
        self._add(RecordedOp("trunc_normal_", call, arguments, {}, None, storage, storage, True))
        return tensor

    def _add(self, op: RecordedOp) -> None:
        """Add an op, with views in place of its meta tensors."""
        args, kwargs, out = private.tree_map(self._as_view, (op.args, op.kwargs, op.out))
        self.recording.ops.append(replace(op, args=args, kwargs=kwargs, out=out))

    def _as_view(self, leaf: Any) -> Any:
        return self.view(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf


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
