"""Gradient accumulation that pays owed reductions once for all its backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from parallelize.sharding import require_record


@contextmanager
def accumulate_gradients(module: nn.Module) -> Iterator[None]:
    """Run several backward passes inside; owed gradients (norms under sequence parallelism) are summed when it ends.

    Without it each backward pass settles its own: the same numbers, one small all-reduce more a pass.

    Raises: ModelError `not-parallelized`.
    """
    with require_record(module).ledger.accumulating():
        yield
