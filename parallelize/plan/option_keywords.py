"""The fields of `Options` as keyword arguments, for type checkers and editors: a test compares the two."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch


class OptionKeywords(TypedDict, total=False):
    """See `Options`. None: the plan's default."""

    schedule: str | None
    num_microbatches: int | None
    stages_per_rank: int | None
    zero: int | None
    defer: bool | None
    sequence_parallel: bool | None
    loss_parallel: bool | None
    fuse_loss: bool | None
    overlap: str | None
    overlap_microbatches: bool | str | None
    ulysses: int | None
    ep: int | None
    etp: int | None
    expert_placement: Mapping[str, Sequence[int]] | str | os.PathLike | None
    recompute: str | None
    recompute_every: int | None
    recompute_save: str | Sequence[str] | None
    dtype: str | torch.dtype | None
    reduce_dtype: str | torch.dtype | None
    compare_every: int | None
