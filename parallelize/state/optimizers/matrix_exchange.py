"""Shards of matrices to their owners, and updates back: one all-to-all each way, whatever the number of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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
from parallelize.state.optimizers.matrices import flops_of, matrix_shape_of

T = torch.Tensor
SENT = torch.bfloat16
"""The first thing that the orthogonalization does is to round to it, and it is the dtype of its result: nothing is
lost."""


class MatrixExchange:
    """The two exchanges of a step.

    Args:
        matrices: all, in the same order on every rank.
        pairs: name -> (local, full) slices that this rank stores.
        group: the ranks that share the matrices; None for one process.
    """

    def __init__(self, matrices: Sequence[OwnedMatrix], pairs: Mapping[str, Sequence[SlicePair]], group: Group | None):
        self._group = group
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self.owned = [matrix for matrix in matrices if matrix.owner == self.rank]
        self._to_owner = exchanged_elements(matrices, self.rank, self.size, to_owner=True)
        self._from_owner = exchanged_elements(matrices, self.rank, self.size, to_owner=False)
        self._sends = self._stored_here(matrices, pairs, lambda part: part.sender == self.rank)
        self.stored_here = self._stored_here(matrices, pairs, lambda part: self.rank in part.holders)

    @property
    def sent_elements(self) -> int:
        """What this rank sends to others in a step, both ways together."""
        both = (self._to_owner[0], self._from_owner[0])
        return sum(count for sent in both for rank, count in enumerate(sent) if rank != self.rank)

    def _stored_here(
        self, matrices: Sequence[OwnedMatrix], pairs: Mapping[str, Sequence[SlicePair]], takes: Callable[[Any], bool]
    ) -> list[tuple[OwnedMatrix, SlicePair]]:
        """Elements of a matrix that this rank stores, by owner and in the order of matrices: as the buffers of both
        exchanges are."""
        stored = []
        for matrix in sorted(matrices, key=lambda matrix: matrix.owner):
            for part in matrix.parts:
                if takes(part):
                    inside = (pair.within(part.box) for pair in pairs[matrix.name])
                    stored.append((matrix, next(pair for pair in inside if pair is not None and pair.box == part.box)))
        return stored

    def gather(self, updates: Mapping[str, T], device: torch.device) -> list[T]:
        """The matrices that this rank owns, in full. `updates`: name -> local tensor; a parameter without one sends
        zeros."""
        flat = torch.zeros(sum(self._to_owner[0]), dtype=SENT, device=device)
        at = 0
        for matrix, pair in self._sends:
            count = volume(pair.box)
            if matrix.name in updates:
                view = flat[at : at + count].view(shape_of(pair.box))
                view.copy_(updates[matrix.name][pair.local])
            at += count
        received = self._all_to_all(flat, *self._to_owner)
        return self._assembled(received)

    def _assembled(self, received: T) -> list[T]:
        """The full matrices, from what each sender has sent, in the order of matrices and parts."""
        full = [torch.empty(matrix.shape, dtype=SENT, device=received.device) for matrix in self.owned]
        at = 0
        for sender in range(self.size):
            for matrix, target in zip(self.owned, full, strict=True):
                for part in matrix.parts:
                    if part.sender == sender:
                        count = volume(part.box)
                        view = received[at : at + count].view(shape_of(part.box)[-2:])
                        target[_slices_in_matrix(part.box, matrix.box)].copy_(view)
                        at += count
        return full

    def scatter(self, results: Sequence[T], device: torch.device) -> list[T]:
        """For each of `stored_here`, its elements of the owner's result. `results`: of the matrices that this rank
        owns."""
        flat = torch.empty(sum(self._from_owner[0]), dtype=SENT, device=device)
        at = 0
        for to in range(self.size):
            for matrix, result in zip(self.owned, results, strict=True):
                for part in matrix.parts:
                    if to in part.holders:
                        count = volume(part.box)
                        view = flat[at : at + count].view(shape_of(part.box)[-2:])
                        view.copy_(result[_slices_in_matrix(part.box, matrix.box)])
                        at += count
        received = self._all_to_all(flat, *self._from_owner)
        boxes = [pair.box for _, pair in self.stored_here]
        parts = received.split([volume(box) for box in boxes])
        return [part.view(shape_of(box)) for box, part in zip(boxes, parts, strict=True)]

    def _all_to_all(self, flat: T, sent: list[int], received: list[int]) -> T:
        if self._group is None or self.size == 1:
            return flat
        width = SENT.itemsize  # as bytes, because not every backend sends bfloat16
        counts = [count * width for count in sent], [count * width for count in received]
        return self._group.all_to_all(flat.view(torch.uint8), *counts).view(SENT)

    def any_rank(self, flags: list[bool], device: torch.device) -> list[bool]:
        """Whether each flag is set on any rank."""
        if self._group is None or self.size == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32, device=device)
        self._group.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]


def _slices_in_matrix(box: Box, matrix: Box) -> tuple[slice, ...]:
    return slices_of(relative_to(box, starts(matrix))[-2:])


# -- owners ----------------------------------------------------------------------------------------------------------
# Which rank computes each matrix, and which boxes go to it and back. Arithmetic on what each rank stores: the same on
# all ranks.


Stored = Sequence[Mapping[str, Sequence[Box]]]
"""For each rank: name of a parameter -> boxes of the full parameter that it stores."""


@dataclass(frozen=True)
class BoxOfMatrix:
    """Elements of a matrix that the same ranks store. `sender`: the rank that sends them to the owner, itself
    perhaps."""

    box: Box
    sender: int
    holders: tuple[int, ...]


@dataclass
class OwnedMatrix:
    """A matrix and the rank that computes it.

    Attributes:
        name: of the parameter. box: the matrix in the full parameter. parts: boxes that cover it once.
    """

    name: str
    box: Box
    owner: int
    parts: list[BoxOfMatrix] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        return matrix_shape_of(self.box)


def assign_owners(matrices: Sequence[tuple[str, Box]], stored: Stored, num_steps: int) -> list[OwnedMatrix]:
    """Divide matrices among ranks by their cost, the most expensive first: each to the rank with the least so far.

    A rank is considered if it stores at least half as much of the matrix as any does. So experts stay where they are.

    Raises: ModelError `matrix-not-covered`.
    """
    loads, sent = [0] * len(stored), [0] * len(stored)
    storing = _storing_ranks(stored)
    order = sorted(matrices, key=lambda matrix: (-flops_of(matrix_shape_of(matrix[1]), num_steps), matrix))
    owned = []
    for name, box in order:
        holders = _holders(name, box, storing.get(name, {}), len(stored))
        elements: dict[int, int] = {}
        for part, ranks in holders.items():
            for rank in ranks:
                elements[rank] = elements.get(rank, 0) + volume(part)
        most = max(elements.values())
        owner = min((rank for rank in elements if 2 * elements[rank] >= most), key=lambda rank: (loads[rank], rank))
        loads[owner] += flops_of(matrix_shape_of(box), num_steps)
        matrix = OwnedMatrix(name, box, owner)
        for part, ranks in sorted(holders.items()):
            sender = owner if owner in ranks else min(ranks, key=lambda rank: sent[rank])
            sent[sender] += 0 if sender == owner else volume(part)
            matrix.parts.append(BoxOfMatrix(part, sender, tuple(ranks)))
        owned.append(matrix)
    return owned


def exchanged_elements(
    matrices: Sequence[OwnedMatrix], rank: int, size: int, *, to_owner: bool
) -> tuple[list[int], list[int]]:
    """(elements that a rank sends to each of `size` ranks, elements that it receives from each), itself among them.

    Args:
        to_owner: of shards on their way to the owners; else of updates on their way back.
    """
    sent, received = [0] * size, [0] * size
    for matrix in matrices:
        for part in matrix.parts:
            elements = volume(part.box)
            pairs = [(part.sender, matrix.owner)] if to_owner else [(matrix.owner, to) for to in part.holders]
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
    """Boxes that cover the matrix -> the ranks that store each."""
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
