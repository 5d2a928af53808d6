"""A vocabulary that is sharded over ranks: which ids lie where.

Rank r holds rows [start, stop) of a vocabulary of V, cut as `torch.chunk` cuts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.layout import even_interval


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of `full` entries, sharded over a group."""

    full: int
    group: Group

    @property
    def start(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[0]

    @property
    def stop(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[1]

    def __deepcopy__(self, memo: dict) -> Vocabulary:
        return self


def check_ids(ids: torch.Tensor, full: int, what: str) -> None:
    """Ids beyond the vocabulary would count as another rank's and silently become zeros.

    Raises: ShapeError `id-out-of-range` (on an accelerator, its own asynchronous assertion).
    """
    if ids.is_meta or torch.compiler.is_compiling() or not ids.numel():
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < full)).all())
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= full:
        what = f"{what} lie in {low}..{high}, the vocabulary has {full} entries"
        raise ShapeError(Problem("id-out-of-range", what, fix=f"give ids from 0 to {full - 1}"))


def local_ids(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids counted from `start`, 0 where they lie outside; the mask of those outside)."""
    outside = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill_(outside, 0), outside
