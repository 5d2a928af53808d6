"""Gradients summed over the data axes while backward runs.

A hook on each parameter sees its finished gradient; when a bucket has all of its gradients, it is sent. Buckets are
sent in the same order on every rank. In a plain loop each backward ends with its gradients reduced. An engine that runs
several backwards per step controls this: `hold`, `release` before a stage's last backward, `flush` after each, `finish`
at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.zero.buckets import (
    AllReduceBucket,
    Bucket,
    BucketParams,
    BufferPool,
    ReduceScatterBucket,
    to_local,
)
from parallelize.axes.zero.data_ranks import BUCKET_BYTES, DataGroups, GradientSize, partition
from parallelize.base.errors import ModelError, Problem, warn_caller
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

IN_FLIGHT = 1
"""Reduce-scatters that run at once, so that few buffers of full gradients exist."""


@dataclass(frozen=True)
class ReducedParameter:
    """A parameter whose gradient is reduced.

    `stage`: of the pipeline. `late`: its gradient is known only when a step ends. `uses`: how often a backward adds to
    it. `groups`: the ranks that sum it, which are others for experts that are folded over data axes.
    """

    name: str
    param: nn.Parameter
    stage: int = 0
    late: bool = False
    uses: int = 1
    groups: DataGroups = field(default_factory=DataGroups)

    @property
    def is_split(self) -> bool:
        """Whether a rank keeps some rows of the gradient. A scalar has none; an expert may have no copy on a rank to
        split it with."""
        return self.groups.shard is not None and self.param.ndim > 0


class Reducer:
    """Reduces the gradients of a model over its data axes.

    Args:
        managed: the parameters whose gradients are reduced.
        dtype: the dtype of the sums. None: each parameter's own.
        frozen: parameters that require no gradient now. One that has a gradient at the end of a step, and was not given
            to `manage`, is refused.
        named_parameters: returns the names and parameters of the model as it is now. One that was added is refused at
            the end of a step in which it has a gradient.
        on_reduced: called when all gradients of a step are reduced.
        specs: id of a parameter -> the spec of its split gradient.
        defer: ZeRO 2 reduces once per step too, and stores full gradients until then.
    """

    splits_backward = True

    def __init__(
        self,
        managed: Sequence[ReducedParameter],
        dtype: torch.dtype | None,
        *,
        frozen: Sequence[ReducedParameter] = (),
        named_parameters: Callable[[], Iterable[tuple[str, Any]]] = tuple,
        on_reduced: Callable[[], None] | None = None,
        specs: dict[int, Any] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        defer: bool = False,
    ):
        self.specs, self.defer = specs or {}, defer
        self.splits = any(parameter.groups.shard is not None for parameter in (*managed, *frozen))
        self.dtype, self.frozen, self.on_reduced, self.named_parameters = (
            dtype,
            list(frozen),
            on_reduced,
            named_parameters,
        )
        self.before_step: Callable[[], None] | None = None  # called before a step of several backwards
        self._bucket_bytes, self._pool = bucket_bytes, BufferPool()
        self._nodes: list[Any] = []  # referenced here, or PyTorch would make new nodes without our hooks
        self.managed: list[ReducedParameter] = []
        self._known = {id(parameter.param) for parameter in frozen}
        self.buckets: list[Bucket] = []
        self._next_bucket: dict[int, int] = {}  # stage -> index of the next bucket to send
        self._held_stages: set[int] = set()  # stages that reduce nothing for now
        self._unreduced_stages: set[int] = set()  # stages with a backward that is still to be reduced
        self._in_step = False  # between `hold` and `finish`: an engine says when to reduce
        self._auto_flush = False
        self._queued: int | None = None  # the backward at whose end `_end_of_backward` is called
        self._ran_forward = True  # since the last reduction
        self._in_flight: list[Bucket] = []
        self.manage(managed)

    def manage(self, parameters: Sequence[ReducedParameter]) -> None:
        """Reduce the gradients of these parameters from now on: between two backwards, on all data ranks."""
        # what is not split is stored in full, and reduced once per step: a backward would add to sums that are on their
        # way
        managed = [replace(p, late=p.late or (self.splits and not p.is_split)) for p in parameters]
        ids = {id(parameter.param) for parameter in managed}
        self.frozen = [parameter for parameter in self.frozen if id(parameter.param) not in ids]
        self._known |= ids
        self.managed += managed
        self.buckets += self._make_buckets(managed)
        self._index_buckets()
        if self._held_stages:
            self._held_stages |= set(self._stages)
            self._unreduced_stages |= set(self._stages)
        for parameter in managed:
            param: Any = parameter.param
            if self._grad_dtype(param) != param.dtype:
                param.grad_dtype = None  # autograd then accepts a gradient that is wider than the parameter
            self._watch(param)
            param.register_post_accumulate_grad_hook(_weak_hook(weakref.WeakMethod(self._after_accumulation)))

    def _index_buckets(self) -> None:
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        self._stages = sorted({bucket.stage for bucket in self.buckets})
        self._by_stage = {stage: [b for b in self.buckets if b.stage == stage] for stage in self._stages}

    def drop(self, ids: set[int]) -> None:
        """Reduce the gradients of these parameters no more, which were replaced: between two steps, on all data ranks.

        ids: of parameters. The others of their buckets get new ones.

        Raises: ModelError `added-parameter` where these others have gradients, of which the new buckets would know
            nothing.
        """
        changed = [bucket for bucket in self.buckets if ids & {id(param) for param in bucket.params}]
        remaining = {id(param): param for bucket in changed for param in bucket.params if id(param) not in ids}
        if any(param.grad is not None for param in remaining.values()):
            what = "a layer was replaced while parameters have gradients, which may be sums over data ranks already"
            raise ModelError(Problem("added-parameter", what, fix="optimizer.zero_grad() first, then replace it"))
        moved = [parameter for parameter in self.managed if id(parameter.param) in remaining]
        self.managed = [parameter for parameter in self.managed if id(parameter.param) not in ids]
        self.frozen = [parameter for parameter in self.frozen if id(parameter.param) not in ids]
        self._known -= ids
        self.buckets = [bucket for bucket in self.buckets if bucket not in changed]
        self.buckets += self._make_buckets(moved)
        self._index_buckets()

    def _watch(self, param: Any) -> None:
        """Call `_before_accumulation` when a backward is about to add to `.grad`, but not for `torch.autograd.grad`."""
        before = partial(_weak_hook(weakref.WeakMethod(self._before_accumulation)), id(param))
        if isinstance(param, DTensor):  # planned modules pass gradients on themselves, and call these hooks
            param.register_hook(before)
            return
        with torch.enable_grad():
            node: Any = param.view_as(param).grad_fn.next_functions[0][0]
        node.register_prehook(before)
        self._nodes.append(node)

    def _grad_dtype(self, param: Any) -> torch.dtype:
        return self.dtype or param.dtype

    def newly_unfrozen(self) -> list[ReducedParameter]:
        """Those that were frozen and train now."""
        return [parameter for parameter in self.frozen if parameter.param.requires_grad]

    def _make_buckets(self, managed: Sequence[ReducedParameter]) -> Iterable[Bucket]:
        for indices in partition([self._size(parameter) for parameter in managed], self._bucket_bytes):
            yield self._build_bucket([managed[index] for index in indices])

    def _size(self, parameter: ReducedParameter) -> GradientSize:
        param = parameter.param
        dtype = self._grad_dtype(param)
        num_bytes = to_local(param).numel() * dtype.itemsize
        kind = (parameter.stage, dtype, param.device, param.ndim == 0, parameter.groups)
        return GradientSize(kind, num_bytes, parameter.late)

    def _build_bucket(self, parameters: list[ReducedParameter]) -> Bucket:
        first = parameters[0]
        full, shard = first.groups.full, first.groups.shard
        members = BucketParams(
            params=[parameter.param for parameter in parameters],
            uses=[parameter.uses for parameter in parameters],
            stage=first.stage,
            late=first.late,
            dtype=self._grad_dtype(first.param),
            groups=[*full, shard] if shard is not None and not first.is_split else full,
        )
        if shard is None or not first.is_split:
            return AllReduceBucket(members)
        return ReduceScatterBucket(members, shard=shard, specs=self.specs, pool=self._pool)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _before_accumulation(self, param_id: int, grad: Any) -> None:
        """A backward is about to add to `.grad`, which may be the result of a reduction."""
        if param_id in self._bucket_of:  # not dropped
            self._bucket_of[param_id].prepare_for_backward()

    def _after_accumulation(self, param: Any) -> None:
        """A backward has added to `.grad`."""
        bucket = self._bucket_of.get(id(param))
        if bucket is None:  # dropped: it is of no model any more
            return
        number = private.backward_id()
        if self._queued not in (None, number) and number != -1:  # the previous backward never came to its end
            if self._in_step and self._auto_flush:
                raise _failed_in_a_block()
            if not self._in_step:
                self.reset()
        bucket.collect_gradient(param)
        if bucket.stage in self._held_stages or bucket.late:
            bucket.cast_to_sum_dtype(param)
        if bucket.stage in self._held_stages:
            return
        if self._queued is None and number != -1 and (not self._in_step or self._auto_flush):
            self._queued = number
            self._unreduced_stages |= set(self._stages)
            private.call_after_backward(self._after_backward)
        if bucket.complete and not bucket.late:
            self._start_complete_buckets(bucket.stage)

    def _after_backward(self) -> None:
        """Queue once more: pending reductions are delivered at the end of the queue too, and must come first."""
        private.call_after_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._queued = None
        if not self._in_step:
            self._warn_of_weights_alone()
            self.finish()
        elif self._auto_flush:
            for stage in self._stages:
                self.flush(stage)
            if not self._held_stages:
                self._show_sums()

    # -- sending --------------------------------------------------------------------------------------------------

    def _start_complete_buckets(self, stage: int) -> None:
        """Send the buckets that are complete, up to the first that is not: the same order on every rank."""
        buckets = self._by_stage[stage]
        index = self._next_bucket.get(stage, 0)
        while index < len(buckets) and buckets[index].complete and not buckets[index].late:
            self._start_reduction(buckets[index])
            index += 1
        self._next_bucket[stage] = index

    def _start_remaining_buckets(self, stage: int) -> None:
        """Send the buckets that are incomplete after a backward, except late ones."""
        for bucket in self._by_stage[stage][self._next_bucket.get(stage, 0) :]:
            if not bucket.late:
                self._start_reduction(bucket)
        self._next_bucket[stage] = 0

    def _start_reduction(self, bucket: Bucket) -> None:
        if bucket in self._in_flight:  # from the previous microbatch
            self._in_flight.remove(bucket)
            bucket.finish_reduction()
        bucket.start_reduction()
        self._in_flight.append(bucket)
        if self.splits and len(self._in_flight) > IN_FLIGHT:
            self._in_flight.pop(0).finish_reduction()

    def _show_sums(self) -> None:
        """Let `.grad` be the sums so far, so that whoever drops or edits gradients before the next backward does so
        here too."""
        for bucket in self._in_flight:
            bucket.finish_reduction()
        self._in_flight = []
        for bucket in self.buckets:
            if not bucket.late:
                bucket.set_grads()

    # -- calls of an engine ---------------------------------------------------------------------------------------

    def hold(self, auto_flush: bool = False) -> None:
        """Begin a step of several backwards. Nothing is reduced before `release`, unless ZeRO 2 reduces in each
        backward.

        `auto_flush`: the caller does not call `flush`; the end of each backward does.
        """
        if self.before_step is not None:
            self.before_step()
        self._in_step, self._auto_flush = True, auto_flush
        for bucket in self.buckets:
            bucket.prepare_for_backward()
        if not self.splits or self.defer:
            self._held_stages = set(self._stages)
            self._unreduced_stages = set(self._stages)

    def release(self, stage: int) -> None:
        """The stage's next backward is its last of the step."""
        self._held_stages.discard(stage)
        for bucket in self._by_stage.get(stage, ()):
            bucket.reset_counts()

    def flush(self, stage: int) -> None:
        """A backward of the stage has ended."""
        if stage in self._by_stage and stage not in self._held_stages:
            self._start_remaining_buckets(stage)
            self._unreduced_stages.discard(stage)

    def finish(self) -> None:
        """All backwards have ended: reduce the remaining buckets, and wait for all reductions."""
        self.refuse_unmanaged()
        self._held_stages.clear()
        for stage in self._stages:
            if stage in self._unreduced_stages:
                self._start_remaining_buckets(stage)
        late = [bucket for bucket in self.buckets if bucket.late]
        for bucket in late:
            self._start_reduction(bucket)
        self._show_sums()
        self._unreduced_stages.clear()
        for bucket in late:
            bucket.set_grads()
        self._in_step = self._ran_forward = False
        if self.on_reduced is not None:
            self.on_reduced()

    def reduces(self, name: str, param: Any) -> bool:
        """Whether a parameter was the model's when it was sharded. One that was frozen then is refused by its
        gradient."""
        return id(param) in self._known

    def reset(self) -> None:
        """Discard the state of a step that failed."""
        for bucket in self._in_flight:
            bucket.wait()
        self._in_flight, self._next_bucket, self._in_step, self._queued = [], {}, False, None
        self._held_stages.clear()
        self._unreduced_stages.clear()
        for bucket in self.buckets:
            bucket.reset_counts()
            bucket.discard_sums()

    def forward_begins(self) -> None:
        """The model computes: the next backward may be that of a loss of this rank's samples."""
        self._ran_forward = True

    def _warn_of_weights_alone(self) -> None:
        """Warn once of a backward without a forward: that of a penalty on weights, which each data rank counts."""
        if self._ran_forward:
            return
        self._ran_forward = True
        ranks = max((bucket.num_ranks for bucket in self.buckets), default=1)
        if ranks > 1:
            text = (
                f"a backward without a forward of the model since the last one: its gradients are summed over {ranks} "
                "data ranks. "
            )
            text += (
                f"Divide a penalty on weights by {ranks}, or use parallelize.add_penalty, which counts it once on "
                "every mesh"
            )
            _warn_once(text)

    def refuse_unmanaged(self) -> None:
        """Raises: ModelError `unmanaged-parameter` for a gradient that no data rank gets."""
        newly_unfrozen = [parameter.name for parameter in self.frozen if parameter.param.grad is not None]
        if newly_unfrozen:
            raise unmanaged_error(
                newly_unfrozen[0], "it was frozen when shard_data was called", "unfreeze parameters before shard_data"
            )
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and id(parameter) not in self._known:
                raise added_error(name)


@cache
def _warn_once(text: str) -> None:
    warn_caller(text)


def _weak_hook(method: weakref.WeakMethod) -> Callable[..., None]:
    """A hook that calls a method of the reducer and does not keep it alive. The model does that.

    Python's garbage collector does not see what a parameter's hooks refer to. A hook that kept the reducer, which has
    the model, would keep every model of the process in memory.
    """

    def hook(*args: Any) -> None:
        bound = method()
        if bound is None:  # the parameter outlives it
            what = "this parameter's model, which sums its gradients over data ranks, was deleted"
            raise ModelError(
                Problem("unreduced-gradients", what, fix="keep the model as long as its parameters are trained")
            )
        bound(*args)

    return hook


def _failed_in_a_block() -> ModelError:
    what = "a backward has failed inside of accumulate_gradients, and ranks have summed a part of it"
    fix = "catch the error outside of `with accumulate_gradients(model):`, zero_grad(), and begin the block again"
    return ModelError(Problem("failed-backward", what, fix=fix))


def added_error(name: str) -> ModelError:
    """The error for a parameter that the model did not have when it was given to `shard_data`."""
    return unmanaged_error(name, "it was added after shard_data", "add modules before shard_data or parallelize_model")


def unmanaged_error(name: str, why: str, fix: str) -> ModelError:
    return ModelError(Problem("unmanaged-parameter", f"{name} has a gradient that is not reduced: {why}", fix=fix))


# -- batchnorm sync --------------------------------------------------------------------------------------------------
# Running statistics of normalizations, such as `nn.BatchNorm1d`: after a backward all data ranks have those of the
# first. Each rank updates them with its own samples, so that replicas would drift apart, and a checkpoint would
# depend on the rank that writes it. The first rank's are an estimate from its samples, as under
# DistributedDataParallel. Training itself does not read them.


_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormSync:
    """The running statistics of a model.

    Args:
        module: the root. Modules with a buffer `running_mean` have them.
        group: the ranks along all data axes.
    """

    def __init__(self, module: nn.Module, group: Group):
        self.group = group
        self._norms = [norm for norm in module.modules() if norm._buffers.get("running_mean") is not None]

    @torch.no_grad()
    def share(self) -> None:
        """Overwrite them with those of the first rank. One broadcast; nothing is sent for a model without any."""
        in_order = [norm._buffers.get(name) for norm in self._norms for name in _NAMES]
        buffers = [buffer for buffer in in_order if buffer is not None]
        if self.group.size == 1 or not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])  # exact, also for counts
        self.group.broadcast(flat, 0)
        if self.group.rank > 0:
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
