"""The numbers that stock PyTorch draws when it builds a model in one process, without storing that model.

A recording is replayed on the CPU with a separate generator. Every draw is repeated, in order and at full size, because
the next one continues from the generator's state. A parameter is computed as one full tensor, passed on, and freed. If
draws of other parameters come between the draws of one parameter, its draws are repeated from saved generator states:
that costs time, but no second tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.randomness.init.recorder import InitRecording, Recipe, RecordedOp, View

Take = Callable[[str, torch.Tensor], None]


def replay_stock(recipe: Recipe, names: Iterable[str], seed: int | None, take: Take) -> None:
    """Call `take(name, full tensor)` for each named parameter, with the values of stock PyTorch after
    `manual_seed(seed)`.

    Args:
        seed: None if none of the parameters draws random numbers; only their own ops are then run.

    Raises: ModelError `unrecordable-initialisation` for a draw that cannot be repeated.
    """
    names_of: dict[int, list[str]] = {}
    for name in names:
        names_of.setdefault(recipe.views[name].storage, []).append(name)
    replayer = _Replayer(recipe, names_of, take, 0 if seed is None else seed)
    replayer.run(draw=seed is not None)


class _Dependencies:
    """The ops on which the final content of a storage depends."""

    def __init__(self, recording: InitRecording):
        self.recording = recording
        self.writers: dict[int, list[int]] = {}
        for index, op in enumerate(recording.ops):
            for storage in op.writes:
                self.writers.setdefault(storage, []).append(index)

    def of(self, storage: int, before: int | None = None) -> list[int]:
        """Indices of these ops, in order. `before`: the content is that before the op of this index."""
        needed: set[int] = set()
        pending = [(storage, len(self.recording.ops) if before is None else before)]
        while pending:
            current, until = pending.pop()
            for index in reversed([index for index in self.writers.get(current, ()) if index < until]):
                if index in needed:
                    continue
                needed.add(index)
                op = self.recording.ops[index]
                pending += [(other, index) for other in op.reads if other != current]
                if self._overwrites(op, current):
                    break
        return sorted(needed)

    def _overwrites(self, op: RecordedOp, storage: int) -> bool:
        """Whether an op overwrites the full storage without reading it."""
        if storage not in op.reads:
            return True
        target = op.args[0] if op.args else None
        if op.name not in _OVERWRITE or not isinstance(target, View) or target.storage != storage:
            return False
        return target.numel * target.dtype.itemsize == self.recording.nbytes[storage]


_OVERWRITE = {"uniform_", "normal_", "trunc_normal_", "zero_", "fill_"}


class _Replayer:
    """Runs a recording, and computes a storage at the last draw that it needs.

    Args:
        names: storage -> names of its parameters.

    Attributes:
        needs: storage -> indices of the ops on which it depends.
    """

    def __init__(self, recipe: Recipe, names: dict[int, list[str]], take: Take, seed: int):
        self.recipe, self.ops, self.names, self.take = recipe, recipe.recording.ops, names, take
        self.dependencies = _Dependencies(recipe.recording)
        self.needs = {storage: self.dependencies.of(storage) for storage in names}
        self.generator = torch.Generator().manual_seed(seed)
        self.states: dict[int, torch.Tensor] = {}  # index of a draw -> the generator's state before it

    def run(self, draw: bool) -> None:
        """Compute all storages; `draw`: whether any of them is random."""
        ready: dict[int, list[int]] = {}  # index of the last draw that a storage needs (-1: none) -> storages
        for storage, indices in self.needs.items():
            ready.setdefault(max((index for index in indices if self.ops[index].random), default=-1), []).append(
                storage
            )
        for storage in ready.pop(-1, ()):
            self._finish(storage)
        used_later = self._used_later(ready)
        for index, op in enumerate(self.ops):
            if op.random and draw:
                self._draw(index, ready.get(index, []), index in used_later)

    def _used_later(self, ready: dict[int, list[int]]) -> set[int]:
        """Draws to repeat at a later draw, because a storage or an input of the later one needs them."""
        used = {
            index
            for last, storages in ready.items()
            for storage in storages
            for index in self.needs[storage]
            if index != last and self.ops[index].random
        }
        draws = [index for index, op in enumerate(self.ops) if op.random]
        return used | {other for index in draws for other in self._inputs_of(index) if self.ops[other].random}

    def _inputs_of(self, index: int) -> list[int]:
        """The ops on which the values depend that a draw reads, such as probabilities, beside those that it
        overwrites."""
        op = self.ops[index]
        needed = (self.dependencies.of(storage, index) for storage in op.reads - op.writes)
        return sorted({other for indices in needed for other in indices})

    def _draw(self, index: int, ready: list[int], used_later: bool) -> None:
        """Advance the generator over one draw, and compute the storages that are ready with it."""
        inputs = self._inputs_of(index)
        if ready or used_later or inputs:
            self.states[index] = self.generator.get_state()
        if not ready:
            self._run_ops([*inputs, index])
        for storage in ready:  # its last draw is this one, after which the generator goes on
            self._finish(storage)
        if not used_later:
            self.states.pop(index, None)

    def _finish(self, storage: int) -> None:
        """Compute one storage and pass its parameters on."""
        storages = self._run_ops(self.needs[storage])
        for name in self.names[storage]:
            self.take(name, _tensor(storages, self.recipe.views[name]))

    def _run_ops(self, indices: list[int]) -> dict[int, Any]:
        """Run ops on real storages, which are returned. A draw with a saved state starts from it."""
        storages: dict[int, Any] = {}
        with torch.no_grad():
            for index in indices:
                op = self.ops[index]
                if index in self.states:
                    self.generator.set_state(self.states[index])
                self._run_op(op, storages)
        return storages

    def _run_op(self, op: RecordedOp, storages: dict[int, Any]) -> None:
        for storage in op.reads:
            if storage not in storages:
                storages[storage] = torch.UntypedStorage(self.recipe.recording.nbytes[storage])
        args, kwargs = private.tree_map(lambda leaf: _real(leaf, storages), (op.args, op.kwargs))
        out = self._drawn(op, args, kwargs) if op.random else op.call(*args, **kwargs)
        if op.out is None:
            return
        for view, value in zip(private.tree_leaves(op.out), private.tree_leaves(out), strict=True):
            if isinstance(view, View) and view.storage not in storages:
                storages[view.storage] = value.untyped_storage()

    def _drawn(self, op: RecordedOp, args: Any, kwargs: dict) -> Any:
        call = getattr(op.call, "overloadpacket", op.call)
        if kwargs.get("generator") is not None:
            raise _unrepeatable(f"{op.name} draws from its own generator")
        try:
            return call(*args, **{**kwargs, "generator": self.generator})
        except (TypeError, RuntimeError) as error:
            raise _unrepeatable(f"{op.name}: {str(error).splitlines()[0]}") from error


def _unrepeatable(what: str) -> ModelError:
    return ModelError(
        Problem(
            "unrecordable-initialisation",
            f"stock PyTorch's numbers cannot be drawn again: {what}",
            fix="initialize with stock=False, and give `rules` for parameters whose distribution is not known",
        )
    )


def _real(leaf: Any, storages: dict[int, Any]) -> Any:
    if isinstance(leaf, View):
        return _tensor(storages, leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _tensor(storages: dict[int, Any], view: View) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.size, view.stride)
