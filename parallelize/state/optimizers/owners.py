"""Shards to the ranks that compute with all of them, the owners, and results back: one all-to-all each way, whatever
the number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.boxes import (
    Box,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
    volume,
)
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import SlicePair
from parallelize.comm.groups import Group
from parallelize.state.records import mesh_of

T = torch.Tensor


class OwnerExchange:
    """The exchanges of a step.

    Args:
        boxes: all, in the same order on every rank.
        pairs: name -> (local, full) slices that this rank stores.
        group: the ranks that share the boxes; None for one process.
    """

    def __init__(self, boxes: Sequence[OwnedBox], pairs: Mapping[str, Sequence[SlicePair]], group: Group | None):
        self._group = group
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self.owned = [owned for owned in boxes if owned.owner == self.rank]
        self._to_owner = exchanged_elements(boxes, self.rank, self.size, to_owner=True)
        self._from_owner = exchanged_elements(boxes, self.rank, self.size, to_owner=False)
        self._sends = self._stored_here(boxes, pairs, lambda part: part.sender == self.rank)
        self.stored_here = self._stored_here(boxes, pairs, lambda part: self.rank in part.holders)

    @property
    def sent_elements(self) -> int:
        """What this rank sends to others in a step, both ways together."""
        both = (self._to_owner[0], self._from_owner[0])
        return sum(count for sent in both for rank, count in enumerate(sent) if rank != self.rank)

    def _stored_here(
        self, boxes: Sequence[OwnedBox], pairs: Mapping[str, Sequence[SlicePair]], takes: Callable[[Any], bool]
    ) -> list[tuple[OwnedBox, SlicePair]]:
        """Elements of a box that this rank stores, by owner and in the order of boxes: as the buffers of both
        exchanges are."""
        stored = []
        for owned in sorted(boxes, key=lambda owned: owned.owner):
            for part in owned.parts:
                if takes(part):
                    inside = (pair.within(part.box) for pair in pairs[owned.name])
                    stored.append((owned, next(pair for pair in inside if pair is not None and pair.box == part.box)))
        return stored

    def gather(self, tensors: Mapping[str, T], dtype: torch.dtype, device: torch.device) -> list[T]:
        """All elements of each box that this rank owns.

        Args:
            tensors: name of a parameter -> local tensor; a parameter without one sends zeros.
            dtype: in which they are sent.
        """
        flat = torch.zeros(sum(self._to_owner[0]), dtype=dtype, device=device)
        at = 0
        for owned, pair in self._sends:
            count = volume(pair.box)
            if owned.name in tensors:
                view = flat[at : at + count].view(shape_of(pair.box))
                view.copy_(tensors[owned.name][pair.local])
            at += count
        received = self._all_to_all(flat, *self._to_owner)
        return self._assembled(received)

    def _assembled(self, received: T) -> list[T]:
        """The full boxes, from what each sender has sent, in the order of boxes and parts."""
        full = [torch.empty(shape_of(owned.box), dtype=received.dtype, device=received.device) for owned in self.owned]
        at = 0
        for sender in range(self.size):
            for owned, target in zip(self.owned, full, strict=True):
                for part in owned.parts:
                    if part.sender == sender:
                        count = volume(part.box)
                        view = received[at : at + count].view(shape_of(part.box))
                        target[_slices_inside(part.box, owned.box)].copy_(view)
                        at += count
        return full

    def scatter(self, results: Sequence[T], dtype: torch.dtype, device: torch.device) -> list[T]:
        """For each of `stored_here`, its elements of the owner's result.

        Args:
            results: of the boxes that this rank owns. dtype: in which they are sent.
        """
        flat = torch.empty(sum(self._from_owner[0]), dtype=dtype, device=device)
        at = 0
        for to in range(self.size):
            for owned, result in zip(self.owned, results, strict=True):
                for part in owned.parts:
                    if to in part.holders:
                        count = volume(part.box)
                        view = flat[at : at + count].view(shape_of(part.box))
                        view.copy_(result[_slices_inside(part.box, owned.box)])
                        at += count
        received = self._all_to_all(flat, *self._from_owner)
        boxes = [pair.box for _, pair in self.stored_here]
        parts = received.split([volume(box) for box in boxes])
        return [part.view(shape_of(box)) for box, part in zip(boxes, parts, strict=True)]

    def _all_to_all(self, flat: T, sent: list[int], received: list[int]) -> T:
        if self._group is None or self.size == 1:
            return flat
        width = flat.dtype.itemsize  # as bytes, because not every backend sends bfloat16
        counts = [count * width for count in sent], [count * width for count in received]
        return self._group.all_to_all(flat.view(torch.uint8), *counts).view(flat.dtype)

    def any_rank(self, flags: list[bool], device: torch.device) -> list[bool]:
        """Whether each flag is set on any rank."""
        if self._group is None or self.size == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32, device=device)
        self._group.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]


def _slices_inside(part: Box, whole: Box) -> tuple[slice, ...]:
    return slices_of(relative_to(part, starts(whole)))


def stage_group(module: nn.Module) -> Group | None:
    """The ranks that have the same parameters, or shards of them: all but those of other pipeline stages. None for one
    process."""
    mesh = mesh_of(module)
    if mesh is None or mesh.size == 1:
        return None
    axes = [axis for axis in mesh.spec.names if axis != "pp"]
    return mesh.group(*axes) if axes else None


def boxes_by_rank(pairs: Mapping[str, Sequence[SlicePair]], group: Group | None) -> Stored:
    """What each rank of a group stores, from the slices that this one does. A collective."""
    boxes = {name: [pair.box for pair in slices] for name, slices in pairs.items()}
    if group is None:
        return [boxes]
    by_rank: list[Any] = [None] * group.size
    dist.all_gather_object(by_rank, boxes, group=group.pg)
    return by_rank


# -- owners ----------------------------------------------------------------------------------------------------------
# Which rank computes with each box, and which parts go to it and back. Arithmetic on what each rank stores: the same
# on all ranks.


Stored = Sequence[Mapping[str, Sequence[Box]]]
"""For each rank: name of a parameter -> boxes of the full parameter that it stores."""


def is_everywhere(name: str, box: Box, stored: Stored) -> bool:
    """Whether every rank stores all of a box."""
    return all(box in boxes.get(name, ()) for boxes in stored)


@dataclass(frozen=True)
class PartOfBox:
    """Elements of a box that the same ranks store. `sender`: the rank that sends them to the owner, itself perhaps."""

    box: Box
    sender: int
    holders: tuple[int, ...]


@dataclass
class OwnedBox:
    """Elements that one rank, the owner, computes with: a matrix of a parameter, or all of it.

    Attributes:
        name: of the parameter. box: of the full parameter. parts: boxes that cover it once.
    """

    name: str
    box: Box
    owner: int
    parts: list[PartOfBox] = field(default_factory=list)


def assign_owners(boxes: Sequence[tuple[str, Box]], stored: Stored, cost: Callable[[Box], float]) -> list[OwnedBox]:
    """Divide boxes among ranks by their cost, the most expensive first: each to the rank with the least so far.

    A rank is considered if it stores at least half as much of the box as any does. So experts stay where they are.

    Args:
        boxes: (name of the parameter, box of it).

    Raises: ModelError `matrix-not-covered`.
    """
    loads, sent = [0.0] * len(stored), [0] * len(stored)
    storing = _storing_ranks(stored)
    order = sorted(boxes, key=lambda item: (-cost(item[1]), item))
    assigned = []
    for name, box in order:
        holders = _holders(name, box, storing.get(name, {}), len(stored))
        elements: dict[int, int] = {}
        for part, ranks in holders.items():
            for rank in ranks:
                elements[rank] = elements.get(rank, 0) + volume(part)
        most = max(elements.values())
        owner = min((rank for rank in elements if 2 * elements[rank] >= most), key=lambda rank: (loads[rank], rank))
        loads[owner] += cost(box)
        owned = OwnedBox(name, box, owner)
        for part, ranks in sorted(holders.items()):
            sender = owner if owner in ranks else min(ranks, key=lambda rank: sent[rank])
            sent[sender] += 0 if sender == owner else volume(part)
            owned.parts.append(PartOfBox(part, sender, tuple(ranks)))
        assigned.append(owned)
    return assigned


def exchanged_elements(
    boxes: Sequence[OwnedBox], rank: int, size: int, *, to_owner: bool
) -> tuple[list[int], list[int]]:
    """(elements that a rank sends to each of `size` ranks, elements that it receives from each), itself among them.

    Args:
        to_owner: of shards on their way to the owners; else of results on their way back.
    """
    sent, received = [0] * size, [0] * size
    for owned in boxes:
        for part in owned.parts:
            elements = volume(part.box)
            pairs = [(part.sender, owned.owner)] if to_owner else [(owned.owner, to) for to in part.holders]
            for source, to in pairs:
                sent[to] += elements if source == rank else 0
                received[source] += elements if to == rank else 0
    return sent, received


def _storing_ranks(stored: Stored) -> dict[str, dict[Box, list[int]]]:
    """Name -> box -> the ranks that store it: most boxes are on many ranks, and are then looked at once."""
    storing: dict[str, dict[Box, list[int]]] = {}
    for rank, by_name in enumerate(stored):
        for name, boxes in by_name.items():
            ranks_of = storing.setdefault(name, {})
            for box in boxes:
                ranks_of.setdefault(box, []).append(rank)
    return storing


def _holders(name: str, box: Box, storing: Mapping[Box, Sequence[int]], num_ranks: int) -> dict[Box, list[int]]:
    """Parts that cover the box -> the ranks that store each."""
    holders: dict[Box, list[int]] = {}
    for other, ranks in storing.items():
        shared = intersection(box, other)
        if shared is not None:
            holders.setdefault(shared, []).extend(ranks)
    for ranks_of_part in holders.values():
        ranks_of_part.sort()
    if sum(map(volume, holders)) != volume(box):
        what = f"the shards of {name} on {num_ranks} ranks do not cover it once: {sum(map(volume, holders))} elements"
        what += f" of {volume(box)}"
        raise ModelError(Problem("matrix-not-covered", what, fix="step this parameter with AdamW: matrices=..."))
    return holders
