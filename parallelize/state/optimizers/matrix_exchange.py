"""Shards of matrices to their owners, and updates back: one all-to-all each way, whatever the number of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.base.files.boxes import (
    Box,
    box_of,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
    volume,
)
from parallelize.base.layout import SlicePair
from parallelize.comm.groups import Group
from parallelize.state.optimizers.owners import OwnedMatrix, exchanged_elements

T = torch.Tensor
SENT = torch.bfloat16
"""The first thing that the orthogonalization does is to round to it, and it is the dtype of its result: nothing is lost."""


@dataclass(frozen=True)
class LocalBox:
    """Elements of a matrix that this rank stores. `local`: slices of its local tensor."""

    matrix: OwnedMatrix
    box: Box
    local: tuple[slice, ...]


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
        self._sends = self._local_boxes(matrices, pairs, lambda part: part.sender == self.rank)
        self.local_boxes = self._local_boxes(matrices, pairs, lambda part: self.rank in part.holders)

    @property
    def sent_elements(self) -> int:
        """What this rank sends to others in a step, both ways together."""
        both = (self._to_owner[0], self._from_owner[0])
        return sum(count for sent in both for rank, count in enumerate(sent) if rank != self.rank)

    def _local_boxes(self, matrices: Sequence[OwnedMatrix], pairs: Any, takes: Callable[[Any], bool]) -> list[LocalBox]:
        """By owner, and in the order of matrices: as the buffers of both exchanges are."""
        boxes = []
        for matrix in sorted(matrices, key=lambda matrix: matrix.owner):
            for part in matrix.parts:
                if takes(part):
                    boxes.append(LocalBox(matrix, part.box, _local_slices(pairs[matrix.name], part.box)))
        return boxes

    def gather(self, updates: Mapping[str, T], device: torch.device) -> list[T]:
        """The matrices that this rank owns, in full. `updates`: name -> local tensor; a parameter without one sends zeros."""
        flat = torch.zeros(sum(self._to_owner[0]), dtype=SENT, device=device)
        at = 0
        for item in self._sends:
            count = volume(item.box)
            if item.matrix.name in updates:
                view = flat[at : at + count].view(shape_of(item.box))
                view.copy_(updates[item.matrix.name][item.local])
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
                        target[_in_matrix(part.box, matrix.box)].copy_(view)
                        at += count
        return full

    def scatter(self, results: Sequence[T], device: torch.device) -> list[T]:
        """For each of `local_boxes`, its elements of the owner's result. `results`: of the matrices that this rank owns."""
        flat = torch.empty(sum(self._from_owner[0]), dtype=SENT, device=device)
        at = 0
        for to in range(self.size):
            for matrix, result in zip(self.owned, results, strict=True):
                for part in matrix.parts:
                    if to in part.holders:
                        count = volume(part.box)
                        view = flat[at : at + count].view(shape_of(part.box)[-2:])
                        view.copy_(result[_in_matrix(part.box, matrix.box)])
                        at += count
        received = self._all_to_all(flat, *self._from_owner)
        sizes = [volume(item.box) for item in self.local_boxes]
        return [part.view(shape_of(i.box)) for i, part in zip(self.local_boxes, received.split(sizes), strict=True)]

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


def _in_matrix(box: Box, matrix: Box) -> tuple[slice, ...]:
    return slices_of(relative_to(box, starts(matrix))[-2:])


def _local_slices(pairs: Sequence[SlicePair], box: Box) -> tuple[slice, ...]:
    """Where a box of the full parameter is in this rank's local tensor."""
    for pair in pairs:
        full = box_of(pair.full)
        if intersection(full, box) == box:
            firsts = [side.start for side in pair.local]
            within = relative_to(box, starts(full))
            return tuple(slice(f + a, f + b) for f, (a, b) in zip(firsts, within, strict=True))
    raise AssertionError(f"{box} is not stored here")
