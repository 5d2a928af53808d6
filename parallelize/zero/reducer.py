"""Gradients summed over the data axes while backward goes on.

A hook on each parameter sees its finished gradient; when all of a bucket have come, the bucket is sent. Buckets go in one
order on every rank. In a plain loop each backward ends with its gradients reduced; an engine that runs several backwards a
step says when: `hold`, `release` before a stage's last backward, `flush` after each, `finish` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.groups import Group
from parallelize.zero.buckets import Bucket, Spare, SplitBucket, WholeBucket, local
from parallelize.zero.partition import BUCKET_BYTES, Piece, partition

IN_FLIGHT = 1


@dataclass(frozen=True)
class Managed:
    """A parameter whose gradient is reduced.

    `stage`: of the pipeline. `late`: its gradient is known only when a step ends. `uses`: how often a backward adds to it.
    """

    name: str
    param: nn.Parameter
    stage: int = 0
    late: bool = False
    uses: int = 1


class Reducer:
    """Reduces the gradients of a model over its data axes.

    Args:
        groups: of the data axes; for split gradients those beside `shard`.
        shard: the axis over which gradients are split, for ZeRO 2.
        specs: id of a parameter -> the spec of its split gradient.
        defer: ZeRO 2 reduces once a step too, and keeps whole gradients until then.
    """

    splits_backward = True

    def __init__(
        self,
        managed: Sequence[Managed],
        groups: Sequence[Group],
        dtype: torch.dtype | None,
        *,
        shard: Group | None = None,
        specs: dict[int, Any] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        defer: bool = False,
    ):
        self.groups, self.shard, self.specs, self.defer = list(groups), shard, specs or {}, defer
        # a scalar has no rows to split: it stays whole, and is reduced once a step
        self.managed = [replace(one, late=one.late or (shard is not None and one.param.ndim == 0)) for one in managed]
        self.dtype = dtype
        self._spare = Spare()
        self._nodes: list[Any] = []  # kept, or PyTorch would make new ones without our hooks
        self.after: Callable[[], None] | None = None  # called when gradients are finished
        self.buckets = list(self._made(bucket_bytes))
        self.of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        self._stages = sorted({bucket.stage for bucket in self.buckets})
        self._by_stage = {stage: [b for b in self.buckets if b.stage == stage] for stage in self._stages}
        self._next: dict[int, int] = {}
        self._held: set[int] = set()  # stages that reduce nothing for now
        self._open: set[int] = set()  # stages with a backward that is to be reduced, and is not yet
        self._manual = self._by_hand = False
        self._queued: int | None = None  # the backward at whose end something is to be done
        self._flying: list[Bucket] = []
        for one in self.managed:
            if self._stored(one.param) != one.param.dtype:
                one.param.grad_dtype = None  # type: ignore[attr-defined]  # gradients are wider than parameters
            self._watch(one.param)
            one.param.register_post_accumulate_grad_hook(self._after)

    def _watch(self, param: Any) -> None:
        """Have `_before` called when `.grad` is about to be added to, and not when somebody asks for a derivative."""
        if isinstance(param, DTensor):  # planned modules hand gradients over, hooks and all
            param.register_hook(partial(self._before, param))
            return
        with torch.enable_grad():
            node: Any = param.view_as(param).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: self._before(param, grads))
        self._nodes.append(node)

    def _stored(self, param: Any) -> torch.dtype:
        return self.dtype or param.dtype

    def _made(self, bucket_bytes: int) -> Iterable[Bucket]:
        for places in partition([self._piece(one) for one in self.managed], bucket_bytes):
            ones = [self.managed[place] for place in places]
            yield self._bucket(ones, self._stored(ones[0].param))

    def _piece(self, one: Managed) -> Piece:
        dtype = self._stored(one.param)
        scalar = one.param.ndim == 0
        size = local(one.param).numel() * dtype.itemsize
        return Piece((one.stage, dtype, one.param.device, scalar), size, one.late)

    def _bucket(self, ones: list[Managed], dtype: torch.dtype) -> Bucket:
        given = ([one.param for one in ones], [one.uses for one in ones], ones[0].stage, ones[0].late, dtype)
        if self.shard is None or ones[0].param.ndim == 0:  # a scalar has no rows
            return WholeBucket(*given)
        return SplitBucket(*given, shard=self.shard, specs=self.specs, spare=self._spare)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _before(self, param: Any, grad: Any) -> None:
        """Before a backward adds to `.grad`: what stands there may have been reduced already."""
        bucket = self.of[id(param)]
        if isinstance(bucket, WholeBucket):
            if bucket.reduced:
                bucket.reopen()
        elif isinstance(bucket, SplitBucket) and bucket.shown:
            bucket.hide()

    def _after(self, param: Any) -> None:
        bucket = self.of[id(param)]
        number = private.backward_id()
        if self._queued not in (None, number) and number != -1 and not self._manual:
            self.reset()  # the backward before has failed, and so never came to its end
        bucket.take(param)  # type: ignore[attr-defined]
        if (bucket.stage in self._held or bucket.late) and isinstance(bucket, SplitBucket):
            bucket.widen(param)
        if bucket.stage in self._held:
            return
        if self._queued is None and number != -1 and (not self._manual or self._by_hand):
            self._queued = number
            self._open |= set(self._stages)
            private.call_after_backward(self._after_backward)
        if bucket.complete and not bucket.late:
            self._launch_complete(bucket.stage)

    def _after_backward(self) -> None:
        """Once more to the end of the queue: owed gradients are delivered there too."""
        private.call_after_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._queued = None
        if not self._manual:
            self.finish()
        elif self._by_hand:
            for stage in self._stages:
                self.flush(stage)

    # -- sending --------------------------------------------------------------------------------------------------

    def _launch_complete(self, stage: int) -> None:
        """Buckets that have all their gradients, in order: the same on every rank, whatever comes first here."""
        buckets = self._by_stage[stage]
        at = self._next.get(stage, 0)
        while at < len(buckets) and buckets[at].complete and not buckets[at].late:
            self._launch(buckets[at])
            at += 1
        self._next[stage] = at

    def _launch_rest(self, stage: int) -> None:
        """What a backward has left, late buckets apart."""
        for bucket in self._by_stage[stage][self._next.get(stage, 0) :]:
            if not bucket.late:
                self._launch(bucket)
        self._next[stage] = 0

    def _launch(self, bucket: Bucket) -> None:
        if bucket in self._flying:  # of the microbatch before
            self._flying.remove(bucket)
            bucket.land()  # type: ignore[attr-defined]
        whole = self.shard is not None and isinstance(bucket, WholeBucket)
        groups = [*self.groups, self.shard] if whole else self.groups
        bucket.launch(groups)  # type: ignore[attr-defined]
        self._flying.append(bucket)
        if self.shard is not None and len(self._flying) > IN_FLIGHT:  # so that few buffers of whole gradients exist
            self._flying.pop(0).land()  # type: ignore[attr-defined]

    # -- an engine's words ----------------------------------------------------------------------------------------

    def hold(self, by_hand: bool = False) -> None:
        """A step of several backwards begins: nothing is reduced before `release` (ZeRO 2: unless it splits each time).

        `by_hand`: nobody will say `flush`.
        """
        self._manual, self._by_hand = True, by_hand
        for bucket in self.buckets:
            if isinstance(bucket, SplitBucket) and bucket.shown:
                bucket.hide()
            elif isinstance(bucket, WholeBucket) and bucket.reduced:
                bucket.reopen()
        if self.shard is None or self.defer:
            self._held = set(self._stages)
            self._open = set(self._stages)

    def release(self, stage: int) -> None:
        """The stage's next backward is its last of the step."""
        self._held.discard(stage)
        for bucket in self._by_stage.get(stage, ()):
            bucket.begin()

    def flush(self, stage: int) -> None:
        """A backward of the stage has ended."""
        if stage in self._by_stage and stage not in self._held:
            self._launch_rest(stage)
            self._open.discard(stage)

    def finish(self) -> None:
        """All backwards have ended: reduce the rest, wait for all."""
        self._refuse_unmanaged()
        self._held.clear()
        for stage in self._stages:
            if stage in self._open:
                self._launch_rest(stage)
        for bucket in self.buckets:
            if bucket.late:
                self._launch(bucket)
        for bucket in self._flying:
            bucket.land()  # type: ignore[attr-defined]
        self._flying = []
        self._open.clear()
        for bucket in self.buckets:
            if isinstance(bucket, SplitBucket) and not bucket.shown:
                bucket.show()
        self._manual = False
        if self.after is not None:
            self.after()

    def reset(self) -> None:
        """A step has failed: forget what it has begun."""
        for bucket in self._flying:
            bucket.wait()
        self._flying, self._next, self._manual, self._queued = [], {}, False, None
        self._held.clear()
        self._open.clear()
        for bucket in self.buckets:
            bucket.begin()
            if isinstance(bucket, SplitBucket):
                bucket.forget()
            elif isinstance(bucket, WholeBucket):
                bucket.reduced = False

    def _refuse_unmanaged(self) -> None:
        late = [one.name for one in self.unmanaged if one.param.grad is not None]
        if late:
            what = f"{late[0]} has a gradient that is not reduced: it was frozen when the data axes were set up"
            raise ModelError(Problem("unmanaged-parameter", what, fix="unfreeze parameters before shard_data"))

    unmanaged: Sequence[Managed] = ()
