"""Which rank computes each matrix, and which boxes go to it and back. Arithmetic on what each rank stores: the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallelize.base.errors import ModelError, Problem
from parallelize.base.files.boxes import Box, intersection, volume
from parallelize.state.optimizers.matrices import matrix_shape_of
from parallelize.state.optimizers.orthogonalize import flops_of

Stored = Sequence[Mapping[str, Sequence[Box]]]
"""For each rank: name of a parameter -> boxes of the full parameter that it stores."""


@dataclass(frozen=True)
class BoxOfMatrix:
    """Elements of a matrix that the same ranks store. `sender`: the rank that sends them to the owner, itself perhaps."""

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
