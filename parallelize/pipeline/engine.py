"""`Pipeline`: steps of a model over microbatches, on one stage or on many, with one rule for loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.context.inputs import length_of
from parallelize.context.sequences import own_targets
from parallelize.context.state import context_of
from parallelize.errors import ModelError, Problem
from parallelize.groups import Group, axis_group, mesh_spec
from parallelize.handshake import TIMEOUT_S, agree_on
from parallelize.loss import cross_entropy, valid_tokens
from parallelize.mesh import DATA_AXES
from parallelize.pipeline import failure
from parallelize.pipeline.cut import Cut, cut_of
from parallelize.pipeline.feed import Feed, microbatches, share
from parallelize.pipeline.package import Header
from parallelize.pipeline.schedules import Action, Schedule, build_schedule
from parallelize.pipeline.step import Data, Headers, StepRun
from parallelize.pipeline.timeline import Timeline, with_messages
from parallelize.pipeline.transport import Transport
from parallelize.pipeline.units import Outcome, StageRunner
from parallelize.randomness.position import Clock, Position
from parallelize.recomputation import recomputed
from parallelize.sharding import record_of
from parallelize.ties import ties_of

T = torch.Tensor


class Pipeline:
    """Runs training steps and evaluations of a model, over pipeline stages where it was cut into some.

    The loss of a step is the sum over all tokens of all microbatches and data ranks, divided by their count, which is known
    before backward; gradients are sums. So neither depends on how the batch is cut.

    Args:
        module: after `cut_pipeline` and `parallelize_module`; a model that was not cut runs its microbatches in turn.
        mesh: the whole mesh.
        schedule: as given to `cut_pipeline`. stages_per_rank: the same.
        num_microbatches: parts into which each step's batch is cut.
        loss: (model output, targets) -> the SUM of the loss over the microbatch. Default: cross entropy of the logits.
        count: (targets) -> what that sum is divided by, as a whole number. Default: targets that are not -100.
        whole: names of inputs that are never cut over the batch.
        share_inputs: only the first pp rank's inputs and targets count; the others get them from it.
        data: keeps data-parallel ranks in step: the `engine` of `data_of(module)`.
        clock: of `install_dropout`: is told where in training each microbatch stands.

    Attributes:
        steps_done: with the clock it decides what is dropped out, so it goes into checkpoints.
        record: True makes `timeline` draw the last step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        num_microbatches: int = 1,
        loss: Callable[[Any, Any], T] | None = None,
        count: Callable[[Any], T | int] | None = None,
        whole: Collection[str] = (),
        share_inputs: bool = False,
        data: Data | None = None,
        clock: Clock | None = None,
    ):
        self.module, self.mesh, self.data, self.clock = module, mesh, data, clock
        self.steps_done = 0
        self.whole, self.share_inputs = frozenset(whole), share_inputs
        self.loss, self.count = loss or _token_loss, count or valid_tokens
        self.cut = cut_of(module)
        self.spec = mesh_spec(mesh)
        self.group = self.cut.group if self.cut is not None else Group.alone()
        self.schedule = self._schedule(schedule, num_microbatches, stages_per_rank)
        self.actions = with_messages(self.schedule)[self.group.rank]
        self.device = _device(mesh)
        record = record_of(module)
        self.ledger = record.ledger if record is not None else None
        self._splits = any(action.kind == "W" for order in self.schedule.orders for action in order)
        self._overlaps = record is not None and bool(getattr(record.overlap, "sites", ()))
        self.runner = _runner(module, self.cut, record.region if record is not None else None)
        self.ties = ties_of(module)
        self.context = context_of(module)
        self.everyone = axis_group(mesh, *self.spec.names)
        self._headers: Headers = {}
        self._known: set[tuple] = set()
        self._spans: list[tuple[Action, float, float]] = []
        self.record = False

    def _schedule(self, name: str, count: int, stages_per_rank: int | None) -> Schedule:
        if self.cut is None:
            return build_schedule("1f1b", 1, count)
        schedule = build_schedule(name, self.group.size, count, stages_per_rank)
        if schedule.stage_ranks != self.cut.places:
            what = (
                f"{schedule.name} puts stages on ranks {schedule.stage_ranks}, the model is cut for {self.cut.places}"
            )
            raise ModelError(Problem("other-schedule", what, fix="give cut_pipeline the same schedule"))
        return schedule

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, targets: Any = None, **kwargs: Any) -> T:
        """Forward and backward of one batch; gradients are added to `.grad`, reduced over the data axes.

        Call it on every rank, with this data rank's batch (the same on all its pp and tp ranks).

        Returns: the loss, a scalar, the same on every rank.
        Raises: ShapeError `no-inputs`, `indivisible-batch` before anything runs; PipelineError on every rank when a stage
            failed or a rank does not answer.
        """
        args, kwargs, targets = self._shared(args, kwargs, targets)
        feeds = microbatches(args, kwargs, targets, self.schedule.num_microbatches, self.whole)
        total = self._total(targets)
        run = self._run(feeds, lambda output, wanted: self.loss(output, wanted) / total)
        with ExitStack() as stack:
            if self.ledger is not None:
                stack.enter_context(self.ledger.accumulating())
            if self.ties is not None:
                self.ties.reopen()
            if self.data is not None:
                self.data.hold()
            self._execute(run)
        failed, loss = self._outcome(run)
        if self.data is not None:
            self.data.finish()
        if failed:
            if self.data is not None:
                self.data.reset()
            failure.forget_gradients(self.module)
            self._raise(run)
        if self.ties is not None:
            self.ties.reduce_gradients()
        self.steps_done += 1
        return loss

    @torch.no_grad()
    def evaluate(self, *args: Any, targets: Any = None, **kwargs: Any) -> T:
        """The loss of one batch, without gradients. The same on every rank."""
        args, kwargs, targets = self._shared(args, kwargs, targets)
        feeds = microbatches(args, kwargs, targets, self.schedule.num_microbatches, self.whole)
        total = self._total(targets)
        run = self._run(feeds, lambda output, wanted: self.loss(output, wanted) / total, forward_only=True)
        self._execute(run)
        failed, loss = self._outcome(run)
        if failed:
            self._raise(run)
        return loss

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The model's output of each microbatch, on the ranks of the last stage; an empty list on the others."""
        args, kwargs, _ = self._shared(args, kwargs, None)
        feeds = microbatches(args, kwargs, None, self.schedule.num_microbatches, self.whole)
        run = self._run(feeds, None, forward_only=True)
        self._execute(run)
        failed, _ = self._outcome(run)
        if failed:
            self._raise(run)
        return run.outputs

    def timeline(self) -> Timeline:
        """When each action of the last step ran, over all stages: needs `record = True` before it. A collective over pp."""
        spans: list[Any] = [self._spans]
        if self.group.size > 1:
            spans = [None] * self.group.size
            dist.all_gather_object(spans, self._spans, group=self.group.pg)
        return Timeline.from_measured(spans, f"{self.schedule.name}, measured")

    # -- parts ----------------------------------------------------------------------------------------------------

    def _shared(self, args: tuple, kwargs: dict, targets: Any) -> tuple[tuple, dict, Any]:
        """The inputs of this data rank; on `cp` the model takes its own rows of them, and targets are cut here."""
        if self.share_inputs:
            args, kwargs, targets = share((args, kwargs, targets), self.group, self.device)
        if self.context is not None and targets is not None:
            targets = own_targets(self.context, length_of(self.module, args, kwargs), targets)
        return args, kwargs, targets

    def _total(self, targets: Any) -> T:
        """What the loss is divided by: a count over all data ranks. One scalar all-reduce."""
        count = self.count(targets) if targets is not None else 1
        given = count.detach().clone() if isinstance(count, torch.Tensor) else torch.tensor(count)
        total = given.to(self.device)
        axes = [axis for axis in DATA_AXES if axis in self.spec.names and self.spec.size(axis) > 1]
        if axes:
            dist.all_reduce(total, group=axis_group(self.mesh, *axes))
        return total

    def _run(self, feeds: list[Feed], loss_of: Callable[[Any, Any], T] | None, forward_only: bool = False) -> StepRun:
        mode = (torch.is_grad_enabled(), self.module.training)
        signature = feeds[0].signature(mode)
        if self.group.size > 1 and signature not in self._known:
            # only before the first step with inputs of these shapes; data ranks may have others
            with agree_on(self.mesh["pp"], TIMEOUT_S) as facts:
                facts["inputs of the step"] = str(signature)
            self._known.add(signature)
        steps = [step for step in self.actions if not forward_only or _is_forward(step)]
        split = self._splits and not forward_only and self._may_split()
        return StepRun(
            self.schedule,
            steps,
            self.runner,
            Transport(self.group, self.device) if self.group.size > 1 else None,
            feeds,
            signature,
            self._headers,
            self.module,
            loss_of,
            split,
            None if forward_only else self.data,
            self._enter if self.clock is not None else None,
            self.record,
        )

    def _may_split(self) -> bool:
        """Whether the halves of a backward may run apart: what is recomputed or gathered for one is so for the other too."""
        recomputes = any(mode != "off" for mode in recomputed(self.module).values())
        return not recomputes and not self._overlaps and getattr(self.data, "splits_backward", True)

    def _enter(self, stage: int, microbatch: int, feed: Feed) -> None:
        """Data ranks hold neighbouring rows of the global batch."""
        assert self.clock is not None
        offset = self.clock.data[0] * feed.batch + feed.batch_offset
        self.clock.move(Position(self.steps_done, offset, feed.rows))

    def _execute(self, run: StepRun) -> None:
        known = set(self._headers)
        try:
            run.run()
            run.settle()
        except BaseException:
            for key in set(self._headers) - known:  # the other side may not have them
                del self._headers[key]
            raise
        finally:
            self._spans = run.spans
            if self.clock is not None:
                self.clock.move(None)

    def _raise(self, run: StepRun) -> None:
        """The failure, on every rank; in one process alone it is the error itself."""
        if self.mesh.size() == 1 and run.cause is not None:
            raise run.cause
        failure.raise_together(run.failure, self.everyone, run.cause)

    def _outcome(self, run: StepRun) -> tuple[bool, T]:
        """(whether any rank failed, the loss): one all-reduce over the whole mesh."""
        loss = torch.stack(run.losses).sum() if run.losses else torch.zeros((), device=self.device)
        if self.mesh.size() == 1:
            return run.failure is not None, loss
        mine = self._counts_loss()
        told = torch.zeros(2, dtype=torch.float64, device=self.device)
        told[0] = float(run.failure is not None)
        if mine:
            told[1] = loss
        dist.all_reduce(told, group=self.everyone)
        return bool(told[0] > 0), told[1]

    def _counts_loss(self) -> bool:
        """One rank of each tp group counts."""
        here = self.spec.coordinates(self.mesh.mesh.flatten().tolist().index(dist.get_rank()))
        return all(index == 0 for axis, index in here.items() if axis not in (*DATA_AXES, "pp"))


def _is_forward(step: Any) -> bool:
    return step.kind == "F" if isinstance(step, Action) else step.direction == "F"


def _token_loss(output: Any, targets: T) -> T:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return cross_entropy(logits, targets, reduction="sum")


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _runner(module: nn.Module, cut: Cut | None, region: Any) -> Any:
    return WholeModel(module) if cut is None else StageRunner(module, cut, region)


class WholeModel:
    """A model that was not cut."""

    def __init__(self, module: nn.Module):
        self.module = module

    def run(
        self, stage: int, args: tuple, kwargs: dict, content: dict[str, Any], header: Header | None, learn: bool
    ) -> Outcome:
        return Outcome(output=self.module(*args, **kwargs))
