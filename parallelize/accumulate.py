"""Gradient accumulation that pays owed reductions once for all its backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from parallelize.sharding import not_parallelized, record_of


@contextmanager
def accumulate_gradients(module: nn.Module) -> Iterator[None]:
    """Run several backward passes inside; what is summed over ranks is summed once, when the block ends.

    That is what norms and shared heads owe over tp, and what `shard_data` reduces over the data axes (ZeRO 2 and 3 split
    gradients in each pass, unless they were told to defer). Without it each backward pass settles its own: the same numbers,
    more messages.

    Raises: ModelError `not-parallelized`.
    """
    record, data = record_of(module), module.__dict__.get("_parallelize_data")
    if record is None and data is None:
        raise not_parallelized(module)
    engine = data.engine if data is not None else None
    with record.ledger.accumulating() if record is not None else nullcontext():
        if engine is not None:
            engine.hold(by_hand=True)
        try:
            yield
        except BaseException:
            if engine is not None:
                engine.reset()
            raise
    if engine is not None:
        engine.finish()
