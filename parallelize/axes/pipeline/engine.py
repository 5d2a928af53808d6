"""`Pipeline`: steps of a model over microbatches, on one pipeline stage or several."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.pipeline import failure
from parallelize.axes.pipeline.batch_reader import BatchReader, MicrobatchInputs
from parallelize.axes.pipeline.interleaved_actions import (
    InterleavedRunner,
    PairTrial,
    check_overlap_of_microbatches,
    may_overlap_microbatches,
)
from parallelize.axes.pipeline.replica_check import ReplicaCheck
from parallelize.axes.pipeline.schedules import Action, Schedule, build_schedule
from parallelize.axes.pipeline.stage_forward import SingleStageRunner, StageRunner
from parallelize.axes.pipeline.step_check import StepCheck
from parallelize.axes.pipeline.step_runner import Data, StageHeaders, StepRun
from parallelize.axes.pipeline.ties import ties_of
from parallelize.axes.pipeline.timeline import Timeline, with_messages
from parallelize.axes.pipeline.transport import Transport
from parallelize.axes.recomputation.recompute import recomputed
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.comm.handshake import TIMEOUT_S, agree_on
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.plan.adapters import active_adapters, adapted_layers_of
from parallelize.state.forward_rows import BatchPart
from parallelize.state.later_changes import plan_changes
from parallelize.state.randomness.dropout.install import dropout_clock
from parallelize.state.randomness.dropout.position import Clock, Position
from parallelize.state.records import Cut, mark_applied, pipeline_cut, record_of
from parallelize.watchdog.watching import telling_of

log = logging.getLogger("parallelize")
T = torch.Tensor


_MOST_FORMS = 1000
"""Signatures of inputs whose headers are kept."""


class Pipeline:
    """Runs training steps and evaluations of a model over microbatches and, where it has them, pipeline stages.

    Loss = sum over all tokens of all microbatches and data ranks / global count, which is known before backward.
    Gradients are sums. So neither depends on how the batch is split.

    Args:
        module: a model after `cut_pipeline` and `parallelize_module`. A model without stages runs its microbatches
            sequentially.
        mesh: the mesh with all axes.
        schedule: the schedule that was passed to `cut_pipeline`.
        stages_per_rank: as passed to `cut_pipeline`.
        num_microbatches: equal parts of each step's batch.
        loss: (model output, targets) to the SUM of the loss over the microbatch, a scalar. Default: cross entropy of
            the logits, without targets of -100.
        count: (targets) to the integer that the sum of losses is divided by. Default: the number of targets that are
            not -100.
        whole: names of inputs, or "targets", that every microbatch gets in full, not split along the batch. A dict from
            names to bool says for some that they are split (False), where that is not clear.
        share_inputs: inputs and targets of the first pp rank are broadcast, and those of the other pp ranks are
            ignored.
        data: reduces gradients over the data axes. Default: what `shard_data` installed.
        clock: is set to the position in training of each microbatch. Default: what `install_dropout` installed.
        check_replicated: compare in every call what ranks must have alike, see `StepCheck`; and in the first one, that
            targets of the default loss are not the token ids themselves.
        compare_every: with `check_replicated`, compare the parameters that ranks store alike in the first call, and in
            every N-th after it, see `ReplicaCheck`; 0: never.
        overlap_microbatches: run each forward beside the backward of the microbatch before it: see `Options`. On one
            stage. "auto": as the first steps measure.

    Attributes:
        steps_done: number of successful steps. Dropout depends on it, so checkpoints store it.
        record: set it to True to measure the next steps for `timeline`.

    Raises:
        ModelError: `other-schedule` where the model was split for another schedule.
        PlanError, MeshError: those of `build_schedule`.

    Source: see `build_schedule` for the schedules.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: AnyMesh,
        *,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        num_microbatches: int = 1,
        loss: Callable[[Any, Any], T] | None = None,
        count: Callable[[Any], T | int] | None = None,
        whole: Collection[str] | Mapping[str, bool] = (),
        share_inputs: bool = False,
        data: Data | None = None,
        clock: Clock | None = None,
        check_replicated: bool = True,
        compare_every: int = 100,
        overlap_microbatches: bool | str = False,
    ):
        if overlap_microbatches == "auto" and not may_overlap_microbatches(module):
            overlap_microbatches = False
        self.module, self.mesh = module, MeshView.of(mesh)
        self.data = data if data is not None else _installed_engine(module)
        self.clock = clock if clock is not None else dropout_clock(module)
        self.steps_done = 0
        self._first_sequence: int | None = None  # of this data rank, in the global batch; None until something is drawn
        self.cut = pipeline_cut(module)
        self.spec = self.mesh.spec
        self.group = self.cut.group if self.cut is not None else Group.alone()
        self.schedule = self._schedule(schedule, num_microbatches, stages_per_rank)
        self.actions = with_messages(self.schedule)[self.group.rank]
        self.device = _device(self.mesh.device_type)
        record = record_of(module)
        self.pending_reductions = record.pending_reductions if record is not None else None
        self._splits = any(action.kind == "W" for order in self.schedule.orders for action in order)
        self._overlaps = record is not None and bool(record.overlap.call_sites)
        self.runner = _runner(module, self.cut, record.region if record is not None else None)
        self._adapted = adapted_layers_of(module) if self.cut is not None else []
        self.ties = ties_of(module)
        self.world = self.mesh.world.pg
        replicas = ReplicaCheck(module, self.mesh, self.ties, compare_every)
        self.check = StepCheck(self.mesh, self.device, replicas, check_replicated)
        self.batches = BatchReader(
            module,
            self.check,
            num_microbatches=self.schedule.num_microbatches,
            loss=loss,
            count=count,
            whole=whole,
            share_inputs=share_inputs,
            stages=(self.group, self.device),
            refuse_ids=check_replicated,
            check=lambda: check_overlap_of_microbatches(module) if overlap_microbatches else None,
        )
        self._part = BatchPart(0, 0, self.check.place)  # of the running forward
        self._headers: StageHeaders = {}
        self._trained: tuple[bool, ...] | None = None  # at the last call
        self._compared: set[tuple] = set()  # signatures of inputs that the pp ranks have compared
        self._spans: list[tuple[Action, float, float]] = []
        self.run_pair = InterleavedRunner(self.device) if overlap_microbatches else None
        measured = overlap_microbatches == "auto" and self.mesh.size > 1
        self.pair_trial = PairTrial(self._report_pairs) if measured else None
        self.record = False

    def _schedule(self, name: str, count: int, stages_per_rank: int | None) -> Schedule:
        if self.cut is None:
            return build_schedule("1f1b", 1, count)
        schedule = build_schedule(name, self.group.size, count, stages_per_rank)
        if schedule.stage_ranks != self.cut.stage_ranks:
            what = (
                f"{schedule.name} has its stages on ranks {schedule.stage_ranks}, the model on {self.cut.stage_ranks}"
            )
            raise ModelError(Problem("other-schedule", what, fix="pass the same schedule to cut_pipeline"))
        return schedule

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, targets: Any = None, labels: Any = None, **kwargs: Any) -> T:
        """Forward and backward of one batch. Gradients are added to `.grad`, reduced over the data axes.

        Every rank must call it, with the batch of its data rank (the same on all its pp, cp and tp ranks).

        Args:
            args, kwargs: inputs of the full model. Tensors and NumPy arrays with the batch's size in dim 0 are split
                into microbatches; lists and tuples with an entry for each sequence where `whole` says so. Models of
                `transformers` are called with `use_cache=False` unless it is passed: beside a cache they do not look
                for packed documents.
            targets: split in the same way. For the default loss token ids [batch, sequence], -100 for none: `targets[:,
                i]` is compared with the logits at position i, nothing is shifted; `next_tokens(ids)` gives them. For a
                `loss` of your own whatever it reads.
            labels: instead of targets, with the meaning of the stock model: token ids [batch, sequence] or classes,
                -100 for none. They are shifted here where the model's own loss shifts them, see `label_loss`; a decoder
                that was given no input gets what the stock model makes from them. With a `loss` of your own it is an
                input of the model.

        Returns: the mean loss over all data ranks, a scalar without gradient, the same on every rank.

        Raises:
            ShapeError: `no-inputs`, `indivisible-batch`, `unclear-batch-dim` (a tensor or list that may have the
                batch's size by chance), before anything runs.
            ModelError: `gradients-off` under `torch.no_grad()`; of the default loss `no-targets`, `labels-and-targets`,
                `unclear-labels`, `unshifted-targets`, `no-decoder-ids`. Before anything runs.
            HandshakeError: `ranks-diverged` on every rank, where the ranks of a data rank have different inputs or
                targets, or ranks differ in the call, the mode, or the hyperparameters and steps of an optimizer of
                `watch`; and where copies of a tied parameter differ in these or in requires_grad. `replicas-differ` and
                `ties-differ`, where ranks store other values of a parameter that must be equal: compared every N-th
                call, and where copies of a tied parameter were not written to alike.
            PipelineError: `stage-failed` on every rank after an error of a stage; all gradients are dropped, those of
                earlier steps too. `peer-lost` if a rank does not respond. On a mesh of one rank, the original error is
                raised instead of `stage-failed`.

        Cost: activations and their gradients between neighboring stages, an all_reduce of 64 bytes and one of two
            scalars over the mesh, reductions of gradients over the data axes and over ties.
        """
        began = time.perf_counter()
        run = self._loss_run(args, kwargs, targets, labels)
        with ExitStack() as stack:
            if self.pending_reductions is not None:
                stack.enter_context(self.pending_reductions.accumulating())
            if self.ties is not None:
                self.ties.reopen()
            if self.data is not None:
                self.data.hold()
            self._execute(run)
        failed, loss = self._outcome(run, self.pair_trial)
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
        if self.pair_trial is not None:
            self.pair_trial.end_step(time.perf_counter() - began)
        return loss

    @torch.no_grad()
    def evaluate(self, *args: Any, targets: Any = None, labels: Any = None, **kwargs: Any) -> T:
        """The loss of one batch without backward. Every rank must call it. Gradients are not changed, even by an error.

        Args:
            args, kwargs, targets, labels: as in `step`.

        Returns: the mean loss over all data ranks, a scalar, the same on every rank.
        Raises: as `step`.
        Cost: activations between neighboring stages, an all_reduce of 64 bytes and one of two scalars over the mesh.
        """
        run = self._loss_run(args, kwargs, targets, labels, forward_only=True)
        self._execute(run)
        failed, loss = self._outcome(run)
        if failed:
            self._raise(run)
        return loss

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The output of the model for each microbatch, without gradients. Every rank must call it.

        Args:
            args, kwargs: as in `step`.

        Returns: outputs by microbatch on the ranks of the last stage, an empty list on the others.
        Raises: as `step`.
        Cost: activations between neighboring stages, an all_reduce of 64 bytes and one of two scalars over the mesh.
        """
        microbatches, _ = self._microbatches("forward", args, kwargs)
        run = self._run(microbatches, None, forward_only=True)
        self._execute(run)
        failed, _ = self._outcome(run)
        if failed:
            self._raise(run)
        return run.outputs

    def timeline(self) -> Timeline:
        """When each action of the last step ran on each rank, in seconds. Set `record = True` before the step.

        Returns: the timeline of the ranks of this pp group, the same on each of them.
        Cost: one all_gather of objects over `pp`.
        """
        spans: list[Any] = [self._spans]
        if self.group.size > 1:
            spans = [None] * self.group.size
            dist.all_gather_object(spans, self._spans, group=self.group.pg)
        return Timeline.from_measured(spans, f"{self.schedule.name}, measured")

    # -- parts ----------------------------------------------------------------------------------------------------

    def _loss_run(self, args: tuple, kwargs: dict, targets: Any, labels: Any, forward_only: bool = False) -> StepRun:
        """The run of a step or an evaluation."""
        call = "evaluate" if forward_only else "step"
        microbatches, total = self._microbatches(call, args, kwargs, targets, labels)
        return self._run(microbatches, self.batches.loss_of(total, forward_only), forward_only)

    def _microbatches(self, call: str, *arguments: Any) -> tuple[list[MicrobatchInputs], T]:
        """The inputs of this data rank, and the global count."""
        self._take_changes()
        trained = self._trained_parameters()
        self.check.says_changed = self._trained not in (None, trained)
        microbatches, total = self.batches.read(call, self._settings(), *arguments)
        self._trained = trained
        if self.group.size > 1 and self.check.any_changed():
            self._forget_forms()
        # at once on a CPU: whether a forward draws, and asks for it, may differ between ranks, and it is gathered
        at_once = self.clock is not None and self.device.type == "cpu"
        self._first_sequence = self.check.first_sequence() if at_once else None
        return microbatches, total

    def _take_changes(self) -> None:
        """Plan the adapters that the model got since the last call: what stages send may be other tensors, of other
        gradients."""
        plan_changes(self.module)
        if pipeline_cut(self.module) is not self.cut:
            self.cut = pipeline_cut(self.module)
            self.runner.release()
            self.runner = _runner(self.module, self.cut, self.runner.region)
            self._adapted = adapted_layers_of(self.module)
            self._forget_forms()

    def _forget_forms(self) -> None:
        """Let stages say anew what they send, and which of it requires a gradient: on all ranks of the pipeline."""
        self._headers.clear()
        self._compared.clear()

    def _trained_parameters(self) -> tuple[bool, ...]:
        """Which parameters of this rank's stages are frozen decides which of their outputs require a gradient."""
        return tuple(p.requires_grad for p in self.module.parameters()) if self.group.size > 1 else ()

    def _settings(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        kind = self.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return {
            "mode": f"training={self.module.training}, gradients={torch.is_grad_enabled()}, autocast={narrow}",
            "steps done": str(self.steps_done),
        }

    def _run(
        self, microbatches: list[MicrobatchInputs], loss_of: Callable[[Any, Any], T] | None, forward_only: bool = False
    ) -> StepRun:
        # which adapter is active decides what stages send, and of what a gradient is sent back
        adapters = str(getattr(self.module, "active_adapter", None))
        mode = (torch.is_grad_enabled(), self.module.training, adapters, active_adapters(self._adapted))
        if any(microbatch.media or microbatch.length for microbatch in microbatches):
            signatures = [microbatch.signature(mode) for microbatch in microbatches]
        else:  # microbatches of texts alone have the same
            signatures = [microbatches[0].signature(mode)] * len(microbatches)
        if self.group.size > 1 and not self.check.compares and not self._compared.issuperset(signatures):
            # once for inputs of these shapes; other data ranks may have other shapes
            with agree_on(MeshView(self.mesh.device_mesh["pp"]), TIMEOUT_S) as facts:
                facts["inputs of the step"] = str(signatures[0] if len(set(signatures)) == 1 else signatures)
        if len(self._compared) > _MOST_FORMS:  # of images of ever other sizes
            self._forget_forms()
        self._compared.update(signatures)
        steps: list[Any] = [step for step in self.actions if not forward_only or _is_forward(step)]
        in_pairs = self.pair_trial is None or self.pair_trial.in_pairs
        if self.run_pair is not None and in_pairs and not forward_only:
            steps = list(self.run_pair.steps(steps))
        split = self._splits and not forward_only and self._may_split()
        return StepRun(
            schedule=self.schedule,
            steps=steps,
            runner=self.runner,
            transport=Transport(self.group, self.device) if self.group.size > 1 else None,
            microbatches=microbatches,
            signatures=signatures,
            headers=self._headers,
            root=self.module,
            loss_of=loss_of,
            split=split,
            data=None if forward_only else self.data,
            enter=self._enter,
            run_pair=self.run_pair,
            record=self.record,
        )

    def _may_split(self) -> bool:
        """Whether dgrad and wgrad may run separately. Not where both would recompute or gather the same again.

        `transformers` recomputes too where a caller turns it on; a second recompute, in wgrad, would draw the dropout
        of the microbatch that ran last.
        """
        recomputes = any(mode != "off" for mode in recomputed(self.module).values()) or any(
            module.__dict__.get("gradient_checkpointing") is True for module in self.module.modules()
        )
        return not recomputes and not self._overlaps and getattr(self.data, "splits_backward", True)

    def _enter(self, stage: int, microbatch: int, microbatch_inputs: MicrobatchInputs) -> None:
        """Tell the model which part of the batch it gets. Data ranks have consecutive parts of the global batch."""
        self._part.first, tokens = microbatch_inputs.batch_offset, microbatch_inputs.num_tokens
        self._part.tokens = (microbatch_inputs.first_token, tokens) if tokens else None
        if self.clock is not None:
            step = self.steps_done if self.module.training else self.clock.evaluations
            self.clock.move(partial(self._position, step, microbatch_inputs.batch_offset, microbatch_inputs.size))

    def _position(self, step: int, offset: int, rows: int) -> Position:
        if self._first_sequence is None:
            self._first_sequence = self.check.first_sequence()
        return Position(step, self._first_sequence + offset, rows)

    def _execute(self, run: StepRun) -> None:
        known = set(self._headers)
        self._set_compared(self.check.compares)
        self._part = BatchPart(0, run.microbatches[0].batch_size, self.check.place)
        mark_applied(self.module, batch_part=self._part)
        try:
            run.run()
            run.settle()
        except BaseException as error:
            for key in set(self._headers) - known:  # the neighbor may not have them
                del self._headers[key]
            failure.raise_reason(error)
            raise
        finally:
            self._spans = run.spans
            self._set_compared(False)
            mark_applied(self.module, batch_part=None)
            if self.clock is not None:
                self.clock.move(None)
                self.clock.evaluations += not self.module.training

    def _set_compared(self, compared: bool) -> None:
        """Tell what compares the inputs of bare forwards whether the message of this call does so."""
        record = record_of(self.module)
        for check in (self.batches.context, record.inputs if record is not None else None):
            if check is not None:
                check.compared = compared

    def _raise(self, run: StepRun) -> None:
        """Raise the failure on every rank; on a mesh of one rank, the original error."""
        self.check.raise_difference()  # which an accelerator tells only after the step
        if self.mesh.size == 1 and run.cause is not None:
            raise run.cause
        failure.raise_together(run.failure, self.world, run.cause)

    def _report_pairs(self, text: str) -> None:
        record = record_of(self.module)
        if record is not None:
            record.overlap.microbatches = text
        if dist.get_rank() == 0:
            log.info(text)

    def _outcome(self, run: StepRun, trial: PairTrial | None = None) -> tuple[bool, T]:
        """(whether any rank failed, the loss). One all_reduce of two scalars over the mesh, and of a time during a
        trial."""
        loss = torch.stack(run.losses).sum() if run.losses else torch.zeros((), device=self.device)
        if self.mesh.size == 1:
            return run.failure is not None, loss
        trial = trial if trial is not None and trial.is_running else None
        totals = torch.zeros(2 if trial is None else 3, dtype=torch.float64, device=self.device)  # failures, loss, time
        if run.failure is not None:
            totals[0] = 1
        if self.check.counts_loss:
            totals[1] = loss
        if trial is not None:
            totals[2] = trial.own_s or 0.0
        with telling_of(run.cause):
            failure.sum_outcomes(totals, self.world, run.failure, run.cause)
        if trial is not None:
            trial.take(float(totals[2]) / self.mesh.size)
        return bool(totals[0] > 0) or self.check.differs(), totals[1]


def _is_forward(step: Any) -> bool:
    return step.kind == "F" if isinstance(step, Action) else step.direction == "F"


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _installed_engine(module: nn.Module) -> Data | None:
    """What reduces the gradients of a model after `shard_data`. Without it a step would end before they are summed over
    tp, and data ranks would sum what is not complete."""
    data = data_of(module)
    return data.engine if data is not None else None


def _runner(module: nn.Module, cut: Cut | None, region: Any) -> Any:
    return SingleStageRunner(module) if cut is None else StageRunner(module, cut, region)
