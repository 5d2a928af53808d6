"""Refuses what writes one item of a tensor on each rank, where a rank stores several intervals of it.

The files of PyTorch's `HuggingFaceStorageWriter` have one tensor of a name each, so that the last interval would take the place of all.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch.distributed.checkpoint as dcp

from parallelize.base.errors import Problem, ShapeError


@cache
def guard_writers() -> None:
    """Let the writer raise ShapeError `several-intervals` before it writes, from the first save of a `LayoutDTensor` on."""
    writer: Any = getattr(dcp, "HuggingFaceStorageWriter", None)  # since 2.8
    if writer is None:
        return
    stock = writer.prepare_local_plan

    def prepare_local_plan(self: Any, plan: Any) -> Any:
        _refuse(plan)
        return stock(self, plan)

    writer.prepare_local_plan = prepare_local_plan


def _refuse(plan: Any) -> None:
    items = Counter(item.index.fqn for item in plan.items)
    several = [fqn for fqn, count in items.items() if count > 1]
    if several:
        what = f"this rank stores {items[several[0]]} intervals of {several[0]}, and HuggingFaceStorageWriter writes one of a name"
        fix = "parallelize.save_pretrained(model, folder) writes such folders; torch.distributed.checkpoint.FileSystemWriter"
        raise ShapeError(Problem("several-intervals", what, fix=fix))
