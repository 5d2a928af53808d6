"""The numbers that stock PyTorch draws when it builds a model in one process, without ever holding that model.

A tape is played on the CPU with a generator of its own: every draw is made, in order, at full size, because the next one
starts where it ends. What a parameter needs of it becomes one full tensor, is handed over, and is let go of. Where the
draws of one parameter have those of others between them, they are drawn again from the generator's remembered state: that
costs time, never a second tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.randomness.recipes import Recipe
from parallelize.randomness.recording import Node, Tape, View

Take = Callable[[str, torch.Tensor], None]


def play(recipe: Recipe, names: Iterable[str], seed: int | None, take: Take) -> None:
    """Call `take(name, full tensor)` for each of these parameters, as `torch.manual_seed(seed)` and stock would make it.

    `seed=None`: none of them draws anything, and only they are computed.
    Raises: ModelError `unrecordable-initialisation` for a draw that cannot be repeated.
    """
    wanted: dict[int, list[str]] = {}
    for name in names:
        wanted.setdefault(recipe.places[name].storage, []).append(name)
    slices = _Slices(recipe.tape)
    needs = {storage: slices.of(storage) for storage in wanted}
    player = _Player(recipe, wanted, needs, take, 0 if seed is None else seed)
    player.run(draw=seed is not None)


class _Slices:
    """Which ops the final content of a storage depends on."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.writers: dict[int, list[int]] = {}
        for place, node in enumerate(tape.nodes):
            for storage in node.writes:
                self.writers.setdefault(storage, []).append(place)

    def of(self, storage: int) -> list[int]:
        """Places of these ops, in order."""
        found: set[int] = set()
        open_ = [(storage, len(self.tape.nodes))]
        while open_:
            now, before = open_.pop()
            for place in reversed([place for place in self.writers.get(now, ()) if place < before]):
                if place in found:
                    continue
                found.add(place)
                node = self.tape.nodes[place]
                open_ += [(other, place) for other in node.reads if other != now]
                if self._overwrites(node, now):
                    break
        return sorted(found)

    def _overwrites(self, node: Node, storage: int) -> bool:
        """Whether an op leaves nothing of what was there."""
        if storage not in node.reads:
            return True
        target = node.args[0] if node.args else None
        if node.name not in _OVERWRITE or not isinstance(target, View) or target.storage != storage:
            return False
        return target.numel * target.dtype.itemsize == self.tape.nbytes[storage]


_OVERWRITE = {"uniform_", "normal_", "trunc_normal_", "zero_", "fill_"}


class _Player:
    def __init__(
        self, recipe: Recipe, wanted: dict[int, list[str]], needs: dict[int, list[int]], take: Take, seed: int
    ):
        self.recipe, self.nodes, self.wanted, self.needs, self.take = recipe, recipe.tape.nodes, wanted, needs, take
        self.generator = torch.Generator().manual_seed(seed)
        self.states: dict[int, torch.Tensor] = {}

    def run(self, draw: bool) -> None:
        due: dict[int, list[int]] = {}  # the last draw that a storage needs -> storages
        for storage, places in self.needs.items():
            due.setdefault(max((p for p in places if self.nodes[p].random), default=-1), []).append(storage)
        for storage in due.pop(-1, ()):
            self._finish(storage)
        drawn_again = self._interleaved(due)
        for place, node in enumerate(self.nodes):
            if node.random and draw:
                self._draw(place, node, due.get(place, []), place in drawn_again)

    def _interleaved(self, due: dict[int, list[int]]) -> set[int]:
        """Draws that are needed later than where they stand."""
        return {
            place
            for last, storages in due.items()
            for storage in storages
            for place in self.needs[storage]
            if place != last and self.nodes[place].random
        }

    def _draw(self, place: int, node: Node, due: list[int], again: bool) -> None:
        state = self.generator.get_state() if due or again else None
        if again:
            assert state is not None
            self.states[place] = state
        if not due:
            self._play([place])
            return
        if len(due) > 1 or any(self.nodes[p].random and p != place for p in self.needs[due[0]]):
            assert state is not None
            self.states[place] = state
            self._play([place])
            after = self.generator.get_state()
            for storage in due:
                self._finish(storage)
            self.generator.set_state(after)
        else:
            self._finish(due[0])
        if not again:
            self.states.pop(place, None)

    def _finish(self, storage: int) -> None:
        storages = self._play(self.needs[storage])
        for name in self.wanted[storage]:
            self.take(name, _seen(storages, self.recipe.places[name]))

    def _play(self, places: list[int]) -> dict[int, Any]:
        """Run these ops on real storages, which are returned."""
        storages: dict[int, Any] = {}
        with torch.no_grad():
            for place in places:
                node = self.nodes[place]
                if place in self.states:
                    self.generator.set_state(self.states[place])
                self._op(node, storages)
        return storages

    def _op(self, node: Node, storages: dict[int, Any]) -> None:
        for storage in node.reads:
            if storage not in storages:
                storages[storage] = torch.UntypedStorage(self.recipe.tape.nbytes[storage])
        args, kwargs = private.tree_map(lambda leaf: _real(leaf, storages), (node.args, node.kwargs))
        out = self._drawn(node, args, kwargs) if node.random else node.call(*args, **kwargs)
        made = private.tree_leaves(node.out)
        for described, value in zip(made, private.tree_leaves(out), strict=True) if node.out is not None else ():
            if isinstance(described, View) and described.storage not in storages:
                storages[described.storage] = value.untyped_storage()

    def _drawn(self, node: Node, args: Any, kwargs: dict) -> Any:
        call = getattr(node.call, "overloadpacket", node.call)
        if kwargs.get("generator") is not None:
            raise _unrepeatable(f"{node.name} draws from a generator of its own")
        try:
            return call(*args, **{**kwargs, "generator": self.generator})
        except (TypeError, RuntimeError) as error:
            raise _unrepeatable(f"{node.name}: {str(error).splitlines()[0]}") from error


def _unrepeatable(what: str) -> ModelError:
    return ModelError(
        Problem(
            "unrecordable-initialisation",
            f"stock PyTorch's numbers cannot be drawn again: {what}",
            fix="initialise with the toolkit's own generator (stock=False), with `rules` for what it does not know",
        )
    )


def _real(leaf: Any, storages: dict[int, Any]) -> Any:
    if isinstance(leaf, View):
        return _seen(storages, leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _seen(storages: dict[int, Any], view: View) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.size, view.stride)
