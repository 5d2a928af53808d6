"""Which rank computes each matrix, and which boxes go to it and back. Arithmetic on what each rank stores: the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallelize.checkpoint.format.boxes import Box, intersection, volume
from parallelize.errors import ModelError, Problem
from parallelize.optimizers.matrices import matrix_shape_of
from parallelize.optimizers.orthogonalize import flops_of

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
    order = sorted(matrices, key=lambda matrix: (-flops_of(matrix_shape_of(matrix[1]), num_steps), matrix))
    owned = []
    for name, box in order:
        holders = _holders(name, box, stored)
        by_rank = [sum(volume(part) for part, ranks in holders.items() if rank in ranks) for rank in range(len(stored))]
        near = [rank for rank, elements in enumerate(by_rank) if 2 * elements >= max(by_rank)]
        owner = min(near, key=lambda rank: loads[rank])
        loads[owner] += flops_of(matrix_shape_of(box), num_steps)
        matrix = OwnedMatrix(name, box, owner)
        for part, ranks in sorted(holders.items()):
            sender = owner if owner in ranks else min(ranks, key=lambda rank: sent[rank])
            sent[sender] += 0 if sender == owner else volume(part)
            matrix.parts.append(BoxOfMatrix(part, sender, tuple(ranks)))
        owned.append(matrix)
    return owned


def _holders(name: str, box: Box, stored: Stored) -> dict[Box, list[int]]:
    """Boxes that cover the matrix -> the ranks that store each."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(stored):
        for other in boxes.get(name, ()):
            shared = intersection(box, other)
            if shared is not None:
                holders.setdefault(shared, []).append(rank)
    if sum(map(volume, holders)) != volume(box):
        what = f"the shards of {name} on {len(stored)} ranks do not cover it once: {sum(map(volume, holders))} elements"
        what += f" of {volume(box)}"
        raise ModelError(Problem("matrix-not-covered", what, fix="step this parameter with AdamW: matrices=..."))
    return holders
