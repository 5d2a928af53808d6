"""One training step of a model on a mesh, as one rank does it, and how far it lies from the unsharded one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.context.sequences import gather_sequence
from parallelize.context.state import context_of
from parallelize.errors import ModelError, ParallelizeError, Problem
from parallelize.loss import cross_entropy
from parallelize.mesh import SAMPLE_AXES
from parallelize.overlap import site_rows
from parallelize.pieces import data_rank
from parallelize.plan.model import describe
from parallelize.plan.resolve import resolve
from parallelize.sharded_logits import ShardedLogits
from parallelize.sharding import full_parameter, record_of
from parallelize.training import ParallelModel, parallelize_model
from parallelize.verification.case import Case, Mode
from parallelize.verification.compare import Errors, Numbers, compare_named
from parallelize.verification.precision import computing_in, widen_recompute
from parallelize.verification.reference import LEARNING_RATE, InputGradients, logits_of
from parallelize.verification.relate import error_of
from parallelize.verification.trials import Trial
from parallelize.verification.users import place_of, told
from parallelize.verification.watch import Trace, Watch, all_tensors, kept

T = torch.Tensor


@dataclass
class Found:
    """What one rank finds of one batch, and what it has seen."""

    errors: Errors
    trace: Trace


def parallel(trial: Trial, mesh: DeviceMesh, bound: float) -> list[Found]:
    """What this rank finds, batch by batch, until one fails. Call it on every rank of the mesh.

    Raises: ParallelizeError where the plan cannot be applied; UnappliedError where that fails in a way that nobody expects.
    """
    try:
        rank = _Rank(trial, mesh, bound)
    except ParallelizeError:
        raise
    except Exception as error:
        raise UnappliedError(
            Problem("cannot-apply", f"applying the plan failed: {told(error)}", place_of(error))
        ) from error
    found: list[Found] = []
    for case, want in zip(trial.cases, trial.wants, strict=True):
        found.append(rank.compare(case, want, last=case is trial.cases[-1]))
        if found[-1].errors.failed:
            break
    return found


class UnappliedError(ModelError):
    """`parallelize_model` itself failed on a rank. The others wait for it in a handshake, so it is raised at once."""


class _Rank:
    """The model of one rank, with everybody who looks at it."""

    def __init__(self, trial: Trial, mesh: DeviceMesh, bound: float):
        case = trial.cases[0]
        self.mode, self.bound = trial.mode, bound
        self.model = copy.deepcopy(case.model)
        self.place, self.parts = data_rank(mesh, SAMPLE_AXES)
        self.watched = InputGradients(self.model, trial.wants[0].embedding)
        self.outputs = _Outputs(case, self.model)
        self.applied = apply(case, trial.mode, self.model, mesh, self.outputs)
        self.optimizer = self.applied.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
        self.watch = Watch(self.applied.module, keep=not case.request.full_size)
        runner = self.applied.pipeline.runner
        self.runner = _WatchedRunner(runner, self.watch, self.place * trial.mode.microbatches)
        self.applied.pipeline.runner = self.runner
        if case.dtype is torch.float64 and case.request.recompute != "off":
            widen_recompute(self.model)

    def compare(self, case: Case, want: Numbers, last: bool) -> Found:
        """One step on a batch; of the last one also clipping and the optimiser's step."""
        errors = Errors()
        self.optimizer.zero_grad()
        self.watch.restart()
        self.runner.counts.clear()
        self.outputs.seen.clear()
        ends = [("clip_grad_norm_", self._norm), ("the optimiser's step", self._weights)] if last else []
        for outside, do in [("", self._step), ("the gradients", self._gradients), *ends]:
            try:
                do(case, want, errors)
            except Exception as error:  # whatever a plan that does not fit makes of a stock model
                self.watch.note(error, outside)
                assert self.watch.trace.raised is not None
                errors.failed = self.watch.trace.raised.error
                break
        return Found(errors, self.watch.trace)

    def _step(self, case: Case, want: Numbers, errors: Errors) -> None:
        inputs, targets = case.feed(self.place, self.parts)
        with computing_in(case.dtype):
            loss = self.applied.step(**self.watched.feed(inputs), targets=targets)
        self.watch.trace.gradients = {n: kept(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
        errors.add("loss", error_of(loss.reshape(()), want.loss.reshape(()).to(loss.device)))
        self._compare_outputs(case, want, errors)
        got = self.watched.found(self.mode.microbatches)
        if got is not None and want.inputs is not None:
            got = self._over_cp(got, whole=self.watched.leaf is not None)
            errors.add("input gradients", error_of(got, case.part(want.inputs, self.place, self.parts)))

    def _over_cp(self, grad: T, whole: bool) -> T:
        """The gradient of whole inputs is a sum over cp; of the embedding's output each rank has its rows."""
        context = context_of(self.model)
        if context is None:
            return grad
        if not whole:
            return whole_rows(self.model, grad)
        context.group.all_reduce(grad := grad.clone())
        return grad

    def _compare_outputs(self, case: Case, want: Numbers, errors: Errors) -> None:
        """Every tensor of every microbatch; what has no row for each of the batch's cannot be put together."""
        if not self.outputs.seen:
            return  # another stage's
        for at, whole_one in enumerate(want.outputs):
            if not case.comparable(whole_one, self.mode):
                continue
            got = [one[at] for one in self.outputs.seen if len(one) > at]
            wanted = case.part(whole_one, self.place, self.parts)
            missing = len(got) < len(self.outputs.seen) or any(not one.ndim for one in got) != (not wanted.ndim)
            joined = torch.cat(got) if wanted.ndim and not missing else got[0] if got else wanted
            errors.add("outputs", float("inf") if missing else error_of(joined, wanted), f"output {at}" if at else "")

    def _gradients(self, case: Case, want: Numbers, errors: Errors) -> None:
        """A gradient that only some ranks have is taken as zeros here, so that all call the same collectives."""
        grads: dict[str, T] = {}
        named = dict(self.model.named_parameters())
        for name, parameter in named.items():
            if name in want.gradients:
                if parameter.grad is None:
                    errors.add("gradients", float("inf"), name)
                    errors.wrong[name] = float("inf")
                    parameter.grad = torch.zeros_like(parameter)
                grads[name] = whole(self.model, name, parameter.grad)
            elif parameter.grad is not None:
                grads[name] = parameter.grad
        compare_named(errors, "gradients", grads, want, set(named), self.bound)

    def _norm(self, case: Case, want: Numbers, errors: Errors) -> None:
        norm = self.applied.clip_grad_norm_(0.5 * float(want.norm))
        errors.add("gradient norm", error_of(norm.double().cpu().reshape(()), want.norm.double().cpu().reshape(())))

    def _weights(self, case: Case, want: Numbers, errors: Errors) -> None:
        self.optimizer.step()
        weights = {name: whole(self.model, name, parameter) for name, parameter in self.model.named_parameters()}
        compare_named(errors, "weights", weights, want, set(weights), self.bound)


def apply(case: Case, mode: Mode, model: nn.Module, mesh: DeviceMesh, loss: Callable[[Any, Any], T]) -> ParallelModel:
    request = case.request
    return parallelize_model(
        model,
        mesh,
        request.plan,
        zero=request.zero,
        schedule=request.schedule,
        num_microbatches=mode.microbatches,
        stages_per_rank=request.stages_per_rank,
        sequence_parallel=mode.sequence_parallel,
        loss_parallel=mode.loss_parallel,
        overlap=overlap_of(case, mode),
        fuse_loss=request.fuse_loss,
        ulysses=request.ulysses,
        recompute=request.recompute,
        loss=loss,
        count=case.count,
    )


def is_auto(case: Case) -> bool:
    return (case.request.overlap or (case.plan.overlap if case.plan is not None else None)) == "auto"


def overlap_of(case: Case, mode: Mode) -> str | None:
    """As asked; `auto` as `chunked` where a plan has what can be: at these sizes it would overlap nothing."""
    if not is_auto(case) or case.plan is None or case.request.size("tp") == 1:
        return case.request.overlap
    choices = {"sequence_parallel": mode.sequence_parallel, "loss_parallel": mode.loss_parallel}
    facts = describe(case.model)
    resolved = resolve(case.plan.with_options(**choices, overlap="chunked"), facts, case.request.size("tp"))
    return "chunked" if any(True for _ in site_rows(resolved, facts)) else case.request.overlap


class _Outputs:
    """The loss of a step, which keeps the outputs that it sees, whole: for each microbatch a list."""

    def __init__(self, case: Case, model: nn.Module):
        self.case, self.model = case, model
        self.seen: list[list[T]] = []

    def __call__(self, output: Any, targets: Any) -> T:
        with torch.no_grad():
            self.seen.append([whole_rows(self.model, _full(x)).detach().clone() for x in all_tensors(output)])
        if self.case.loss is not None:
            return self.case.loss(output, targets)
        return cross_entropy(logits_of(output), targets, reduction="sum")


def whole_rows(model: nn.Module, x: T) -> T:
    """A tensor with this rank's rows of cp, with all of them. A collective."""
    context = context_of(model)
    if context is None or x.ndim < 2 or x.shape[1] != sum(b - a for a, b in context.own_rows()):
        return x
    return gather_sequence(model, x)


def _full(tensor: T) -> T:
    return tensor.full_tensor() if isinstance(tensor, (ShardedLogits, DTensor)) else tensor


def whole(module: nn.Module, name: str, value: Any) -> T:
    """A parameter or its gradient, whole, whatever has split it. A collective."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    if record_of(module) is not None:
        return full_parameter(module, name, value).detach().clone()
    return value.full_tensor().detach().clone()


class _WatchedRunner:
    """A stage's runner that tells which microbatch is run: those of a stage come in order."""

    def __init__(self, runner: Any, watch: Watch, first: int):
        self.runner, self.watch, self.first = runner, watch, first
        self.counts: dict[int, int] = {}

    def run(self, stage: int, *args: Any, **kwargs: Any) -> Any:
        place = self.counts[stage] = self.counts.get(stage, -1) + 1
        with self.watch.during(self.first + place):
            return self.runner.run(stage, *args, **kwargs)
