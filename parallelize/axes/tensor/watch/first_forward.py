"""Watches the first forward of a planned model in training, and the first one in evaluation, for operations along a
sharded dim.

Between a column and a row linear a rank has some of the features, and inside the sequence-parallel region some of the
tokens. An operation that needs all of them computes other numbers on a shard, without an error. While the first forward
runs, the dim that is a shard is followed from tensor to tensor (`shard_follower.py`), and such an operation is refused
before it runs, on every rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.planned_forward import installed
from parallelize.axes.tensor.watch.shard_dims import Kind, ShardDim, refuse_adapters, refuse_kept_shards
from parallelize.axes.tensor.watch.shard_follower import ShardFollower
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.later_changes import is_of_packages
from parallelize.state.records import applied, record_of

T = torch.Tensor

_active = threading.local()


@dataclass(frozen=True)
class ShardMaker:
    """A module whose output is a shard.

    Attributes:
        kind, dim: of the output; see `ShardDim`. outer: the number of parts that are sharded each by itself.
        units: the number of units of this rank in a part, such as heads; 0: as many as there are features.
    """

    kind: Kind
    dim: int
    outer: int = 1
    units: int = 0


@dataclass
class FirstForwards:
    """What to watch in the forwards of a model. It refers to modules by name, so that a copy of the model has its own.

    Attributes:
        makers: modules that return shards. opaque: modules whose operations the plan decided: their insides are not
            watched.
        entries: the modules whose input conversions enter a sequence-parallel region.
        sequence_dim: of the region.
        watched: the modes (training or not) in which a forward was watched.
        hooks: by name of a module, what begins its watch. Those of parts of the model end with its first watched
            forward.
        ended: hooks of watched forwards that failed. PyTorch iterates over the hooks of a module when its forward
            fails, so that none of them may be removed there: its error would be lost.
    """

    makers: dict[str, ShardMaker]
    opaque: frozenset[str] = frozenset()
    entries: tuple[str, ...] = ()
    sequence_dim: int = 1
    watched: set[bool] = field(default_factory=set)
    hooks: dict[str, Any] = field(default_factory=dict)
    ended: list[Any] = field(default_factory=list)

    def install(self, module: nn.Module, name: str) -> None:
        """Watch the forwards of one module, which may contain others that are watched."""
        self.hooks[name] = module.register_forward_pre_hook(partial(_begin, self, name), with_kwargs=True)

    def begin_again(self, root: weakref.ref[nn.Module]) -> None:
        """Watch the next forwards too, of a model that has other modules now."""
        self.watched.clear()
        model = root()
        if model is not None and "" not in self.hooks:
            self.install(model, "")

    def end(self, name: str, training: bool) -> None:
        """A forward of the module `name` was watched to its end."""
        self.watched.add(training)
        if not name:  # the model is called, so that its hook sees the forwards of the other mode
            for part in [part for part in self.hooks if part]:
                self.hooks.pop(part).remove()
        if len(self.watched) == 2:
            for hook in self.hooks.values():
                hook.remove()
            self.hooks.clear()


def _begin(first: FirstForwards, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Watches the first forward for values of a shard that are read as if they were full."""
    if module.training in first.watched or torch.compiler.is_compiling() or getattr(_active, "watch", None) is not None:
        return
    if private.backward_id() != -1 or any(child._compiled_call_impl is not None for child in module.modules()):
        return
    while first.ended:
        first.ended.pop().remove()
    _Watch(first, name, module).start((args, kwargs))


@contextmanager
def unwatched() -> Iterator[None]:
    """Watch no first forward of this thread inside: the model was watched before."""
    outer = getattr(_active, "watch", None)
    _active.watch = outer or unwatched
    try:
        yield
    finally:
        if outer is None:
            del _active.watch


class _Watch:
    """One watched forward: it begins before the module's forward, and ends after it, also where that fails."""

    def __init__(self, first: FirstForwards, name: str, module: nn.Module):
        self.first, self.prefix, self.module = first, f"{name}." if name else "", module
        self.mode = ShardFollower(module)
        self.undo = ExitStack()

    def start(self, inputs: Any) -> None:
        refuse_adapters(self.module, self.prefix, {*self.first.makers, *self.first.opaque})
        _active.watch = self
        self.undo.callback(_active.__dict__.pop, "watch", None)
        for path, child in self.module.named_modules():
            name = applied(child).name
            if child is not self.module:
                self._hook(name, child)
                self._watch_hooks(name, path, child)
            if name in self.first.entries:
                self._watch_entry(name, child)
        self._mark_inputs(inputs)
        self.ending = self.module.register_forward_hook(self._end, always_call=True)
        self.undo.enter_context(self.mode)

    def _hook(self, fqn: str, child: nn.Module) -> None:
        maker, is_opaque = self.first.makers.get(fqn), fqn in self.first.opaque
        enter, leave = partial(self._enter, is_opaque), partial(self._leave, fqn, maker, is_opaque)
        self.undo.callback(child.register_forward_pre_hook(enter).remove)
        self.undo.callback(child.register_forward_hook(leave, always_call=True).remove)

    def _watch_hooks(self, name: str, path: str, child: nn.Module) -> None:
        """Of a module with forward hooks of the user: what they are given is followed too, and must not outlive the
        forward."""
        hooks = list(child._forward_hooks.values())
        if len(hooks) == 1 or any(is_of_packages(hook) for hook in hooks[:-1]):  # the last one is ours
            return
        see = partial(self._given_to_hooks, self.first.makers.get(name), name or (self.prefix + path))
        self.undo.callback(child.register_forward_hook(see, prepend=True).remove)

    def _given_to_hooks(self, maker: ShardMaker | None, name: str, _: nn.Module, __: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) and output else output
        if isinstance(out, T):
            self._mark(out, maker, name)
            if out in self.mode.shards:
                self.mode.hooked = name
                self.mode.note(out)

    def _enter(self, is_opaque: bool, module: nn.Module, _: Any) -> None:
        self.mode.modules.append(module)
        self.mode.num_opaque += is_opaque

    def _leave(self, fqn: str, maker: ShardMaker | None, is_opaque: bool, _: nn.Module, __: Any, output: Any) -> None:
        self.mode.modules.pop()
        self.mode.num_opaque -= is_opaque
        self.mode.hooked = ""
        out = output[0] if isinstance(output, tuple) and output else output
        if isinstance(out, T):
            self._mark(out, maker, fqn)

    def _mark(self, out: T, maker: ShardMaker | None, fqn: str) -> None:
        if maker is None:
            return
        if maker.kind == "sequence":
            self._mark_tokens(out, maker.dim, fqn)
        elif out.shape[maker.dim] % maker.outer == 0:
            size = maker.units or out.shape[maker.dim] // maker.outer
            self.mode.shards[out] = ShardDim("features", maker.dim, maker.outer, size, fqn)

    def _watch_entry(self, fqn: str, module: nn.Module) -> None:
        planned = installed(module)
        if planned is None or planned.enter is None:
            return
        convert: Callable = planned.enter

        def enter(x: T) -> T:
            out = convert(x)
            self._mark_tokens(out, self.first.sequence_dim, fqn)
            return out

        planned.enter = enter
        self.undo.callback(setattr, planned, "enter", convert)

    def _mark_inputs(self, inputs: Any) -> None:
        """Of a pipeline stage that begins inside the region."""
        record = record_of(self.module)
        region: Any = record.region if record is not None else None
        if region is None or region.inside is None:
            return
        dim, size = self.first.sequence_dim, -(-region.inside // region.group.size)
        for x in private.tree_leaves(inputs):
            if isinstance(x, T) and x.is_floating_point() and x.ndim > dim + 1 and x.shape[dim] == size:
                self._mark_tokens(x, dim, "the stage before")

    def _mark_tokens(self, x: T, dim: int, source: str) -> None:
        region: Any = getattr(record_of(self.module), "region", None)
        if region is not None and not region.scatters():
            return  # one token is decoded, which is not sharded
        self.mode.shards[x] = ShardDim("sequence", dim - x.ndim if dim >= 0 else dim, 1, x.shape[dim], source)
        self.mode.has_tokens = True

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        self.undo.close()
        if output is None:
            self.first.ended.append(self.ending)
        else:
            self.ending.remove()
            refuse_kept_shards(self.mode.hooked_shards, output)
        if output is not None and (self.mode.has_tokens or not self.first.entries):  # None: the forward failed
            self.first.end(self.prefix.rstrip("."), module.training)
