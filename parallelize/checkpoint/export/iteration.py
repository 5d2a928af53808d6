"""The iterator of buckets. It can be left at any moment on any rank, and the other ranks learn it before they wait for
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.export.exchange import BucketExchange, Receivers, StagingBuffer, Values
from parallelize.checkpoint.export.rounds import Rounds
from parallelize.checkpoint.export.weight_buckets import BucketPlan, WeightBucket


class BucketIterator(Iterator[WeightBucket]):
    """Full tensors, bucket by bucket. An object instead of a generator: a generator that never began has no end to
    handle.

    Each bucket is released when the next one is asked for, so that at most two buckets of memory are in use.

    Args:
        limit: bytes of a bucket; a larger tensor has one of its own. target: the device of full tensors.
        ended: called after the last bucket.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        values: Values,
        to: Receivers,
        limit: int,
        target: torch.device,
        rounds: Rounds,
        ended: Callable[[], None],
    ):
        self._plans, self._values, self._to, self._target = plans, values, to, target
        self._rounds, self._ended = rounds, ended
        largest = max((plan.num_bytes for plan in plans), default=0)
        self._most_staged = 2 * max(limit, largest) - largest
        self._staging = StagingBuffer(to.device)
        self._index = 0
        self._closed = False
        self._last: WeightBucket | None = None

    def __len__(self) -> int:
        """The number of all buckets, including those that were yielded."""
        return len(self._plans)

    def __iter__(self) -> BucketIterator:
        return self

    def __next__(self) -> WeightBucket:
        if self._last is not None:
            self._last.release()
        if self._closed:
            raise StopIteration
        try:
            bucket = self._next()
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}".partition("\n")[0][:200])
            raise
        if bucket is None:
            self._finish()
            raise StopIteration
        self._last = bucket
        return bucket

    def _next(self) -> WeightBucket | None:
        """The next bucket, or None at the end. What may fail on one rank alone comes before the ranks go on
        together."""
        if self._index == len(self._plans):
            return None
        plan = self._plans[self._index]
        exchange = BucketExchange(plan, self._values, self._to, self._target, self._staging, self._most_staged)
        exchange.prepare()
        try:
            self._rounds.go_on()
        except CheckpointError as error:
            if "export-stopped" in error.slugs and not exchange.receives:
                self._closed = True  # nothing is missing on a rank that asked for nothing
                return None
            raise
        bucket = WeightBucket(self._index, tuple(plan.tensors), exchange.run())
        self._index += 1
        return bucket

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            self._rounds.leave()
            self._ended()
        self._values = {}

    def close(self, reason: str = "its loop has ended") -> None:
        """Stop the export on this rank. It waits for nobody: other ranks learn it when they ask for the next bucket."""
        if not self._closed:
            self._closed = True
            self._rounds.stop(reason)
        self._values = {}  # they may be the last references to memory of a model that has moved
        if self._last is not None:
            self._last.release()

    def __enter__(self) -> BucketIterator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # while the interpreter shuts down, modules may be gone
            self.close()
