"""A vocabulary that is sharded over ranks: rank r stores ids [start, stop) of V, split as by `torch.chunk`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.comm.handshake import InputCheck


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of `full` entries, sharded over a group. `targets`: compares targets of losses over the group."""

    full: int
    group: Group
    targets: InputCheck | None = None

    @property
    def start(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[0]

    @property
    def stop(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[1]

    def __deepcopy__(self, memo: dict) -> Vocabulary:
        return self


def check_ids(ids: torch.Tensor, full: int, what: str) -> None:
    """Refuse ids outside the vocabulary: every rank would treat them as another rank's, and they would become zeros.

    Raises: ShapeError `id-out-of-range` (on an accelerator, an asynchronous assertion).
    """
    if ids.is_meta or torch.compiler.is_compiling() or not ids.numel():
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < full)).all())
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= full:
        what = f"{what} range from {low} to {high}, and the vocabulary has {full} entries"
        raise ShapeError(Problem("id-out-of-range", what, fix=f"use ids from 0 to {full - 1}"))


def local_ids(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids relative to `start`, 0 for ids outside; the mask of ids outside)."""
    outside = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill_(outside, 0), outside
