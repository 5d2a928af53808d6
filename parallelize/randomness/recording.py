"""What initialisers write, recorded on the meta device: every op that fills or changes a tensor, in order.

A tape names tensors by storage, so views, `.data` and `nn.Parameter` need no bookkeeping: an op on a view is an op on a
place in a storage. `recipes` reads distributions from it; `stock` plays it with real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem


@dataclass(frozen=True)
class View:
    """A tensor as a place in a storage: element offset, sizes and strides."""

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
class Node:
    """One op. `writes` are the storages that it fills or changes, `reads` those that it needs; `random`: it draws."""

    name: str
    call: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    writes: frozenset[int]
    reads: frozenset[int]
    random: bool


@dataclass
class Tape:
    """All ops, and the size in bytes of every storage that they name."""

    nodes: list[Node] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> Tape:
        return self

    def by_storage(self) -> dict[int, list[Node]]:
        """Storage -> the ops that write it, in order."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for storage in node.writes:
                found.setdefault(storage, []).append(node)
        return found


class Recorder:
    """Fills a tape, and tells which place in it a tensor is.

    Storages are kept alive meanwhile, so that their addresses stay theirs; on the meta device they take no memory.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self._alive: dict[int, torch.Tensor] = {}

    def view(self, tensor: torch.Tensor) -> View:
        address = private.storage_address(tensor)
        if address not in self._alive:
            self._alive[address] = tensor.detach()
            self.tape.nbytes[address] = tensor.untyped_storage().nbytes()
        return View(address, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def knows(self, tensor: torch.Tensor) -> bool:
        return private.storage_address(tensor) in self._alive

    def op(self, func: Any, args: tuple, kwargs: dict, run: Callable[[], Any]) -> Any:
        """Run one dispatched op, and write it down where it makes or changes meta tensors."""
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
        made = {self.view(tensor).storage for tensor in outputs if tensor.is_meta and not self.knows(tensor)}
        if made or written:
            name = func.overloadpacket.__name__
            self._add(name, func, args, kwargs, out, made | written, reads, random)
        return out

    def truncated(self, tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
        """`trunc_normal_`, which looks at what it drew and so cannot run on meta: one node of its own."""
        if not tensor.is_meta:
            raise _real_draw("trunc_normal_")
        place = self.view(tensor).storage
        call = torch.nn.init.trunc_normal_
        self._add("trunc_normal_", call, (tensor, mean, std, low, high), {}, None, {place}, {place}, True)
        return tensor

    def _add(self, name: str, call: Any, args: Any, kwargs: Any, out: Any, writes: set, reads: set, random: bool):
        args, kwargs, out = private.tree_map(self._described, (args, kwargs, out))
        self.tape.nodes.append(Node(name, call, args, kwargs, out, frozenset(writes), frozenset(reads), random))

    def _described(self, leaf: Any) -> Any:
        return self.view(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf


def _real_draw(name: str) -> ModelError:
    return ModelError(
        Problem(
            "unrecordable-initialisation",
            f"{name} draws real numbers while initialisation is being recorded",
            fix="leave out `device=` in that call, so that it runs on the meta device; or give `rules`",
        )
    )


@contextmanager
def recording() -> Iterator[Recorder]:
    """New tensors land on the meta device, and every op on them is written down.

    Libraries that skip initialisation on the meta device ask an empty tensor where it is; it says what it would say
    outside.
    """
    recorder = Recorder()
    with private.record_ops(recorder.op), private.on_meta(), private.truncated_normals(recorder.truncated):
        yield recorder
