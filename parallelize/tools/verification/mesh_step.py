"""One training step of a model on a mesh, as one rank runs it, and its errors relative to the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.axes.context.forward_state import context_of
from parallelize.axes.context.local_sequences import gather_sequence
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.axes.tensor.overlap_sites import planned_call_sites
from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.axes.vocabulary.loss.losses import cross_entropy
from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.user_code import location_of
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.model_facts import describe
from parallelize.plan.models.model_source import copy_of
from parallelize.plan.models.nested_tensors import floating_in
from parallelize.plan.models.output_logits import logits_of
from parallelize.plan.resolve import resolve
from parallelize.state.stage_values import stored_like, unsharded
from parallelize.tools.verification.compare import Errors, ReferenceValues, compare_named
from parallelize.tools.verification.configuration import Comparison, Configuration, Mode
from parallelize.tools.verification.module_trace import ModuleTrace, ModuleTracer, local_copy
from parallelize.tools.verification.precision import computing_in, widen_recompute
from parallelize.tools.verification.reference import LEARNING_RATE, InputGradients
from parallelize.tools.verification.relations import error_of
from parallelize.tools.verification.user_errors import summary
from parallelize.training.apply_axes import parallelize_model

T = torch.Tensor


@dataclass
class RankResult:
    """The errors of one rank on one batch, and its trace."""

    errors: Errors
    trace: ModuleTrace


def run_on_rank(comparison: Comparison, mesh: DeviceMesh, bound: float) -> list[RankResult]:
    """This rank's results, batch by batch, until a batch fails. Every rank of the mesh must call it.

    Raises: ParallelizeError where the plan cannot be applied; ApplyError where applying it raises anything else.
    """
    try:
        model = _RankModel(comparison, mesh, bound)
    except ParallelizeError:
        raise
    except Exception as error:
        raise ApplyError(
            Problem("cannot-apply", f"applying the plan failed: {summary(error)}", location_of(error))
        ) from error
    results: list[RankResult] = []
    for configuration, reference in zip(comparison.configurations, comparison.references, strict=True):
        results.append(model.compare(configuration, reference, last=configuration is comparison.configurations[-1]))
        if results[-1].errors.failed:
            break
    return results


class ApplyError(ModelError):
    """`parallelize_model` failed on a rank. The others wait for it in a handshake, so the error ends the run at
    once."""


class _RankModel:
    """The parallel model of one rank, with everything that observes its steps."""

    def __init__(self, comparison: Comparison, mesh: DeviceMesh, bound: float):
        configuration = comparison.configurations[0]
        self.mode, self.bound = comparison.mode, bound
        self.model = copy_of(configuration.model)
        self.data_rank, self.data_size = MeshView(mesh).sample_place
        self.input_gradients = InputGradients(self.model, comparison.references[0].embedding)
        self.recorder = _OutputRecorder(configuration, self.model)
        self.applied = apply(configuration, comparison.mode, self.model, mesh, self.recorder)
        self.optimizer = self.applied.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
        self.tracer = ModuleTracer(self.applied.module, store_tensors=configuration.is_small)
        first_microbatch = self.data_rank * comparison.mode.microbatches
        self.runner = _TracedRunner(self.applied.pipeline.runner, self.tracer, first_microbatch)
        self.applied.pipeline.runner = self.runner
        if configuration.dtype is torch.float64 and configuration.request.options.recompute != "off":
            widen_recompute(self.model)

    def compare(self, configuration: Configuration, reference: ReferenceValues, last: bool) -> RankResult:
        """Run one step on a batch; for the last batch also clipping and the optimizer's step."""
        errors = Errors()
        self.applied.pipeline.steps_done = 0  # the reference of each batch draws the noise of the first step
        self.optimizer.zero_grad()
        self.tracer.restart()
        self.runner.counts.clear()
        self.recorder.outputs.clear()
        after = [("clip_grad_norm_", self._norm), ("the optimizer's step", self._weights)] if last else []
        for outside, part in [("", self._step), ("the gradients", self._gradients), *after]:
            try:
                part(configuration, reference, errors)
            except Exception as error:  # anything that a stock model raises under a plan that does not fit
                self.tracer.record(error, outside)
                assert self.tracer.trace.error is not None
                errors.failed = self.tracer.trace.error.message
                break
        return RankResult(errors, self.tracer.trace)

    def _step(self, configuration: Configuration, reference: ReferenceValues, errors: Errors) -> None:
        inputs, targets = configuration.batch_part(self.data_rank, self.data_size)
        with computing_in(configuration.dtype):
            loss = self.applied.step(**self.input_gradients.start_step(inputs), targets=targets)
        parameters = self.model.named_parameters()
        self.tracer.trace.gradients = {name: local_copy(p.grad) for name, p in parameters if p.grad is not None}
        errors.add("loss", error_of(loss.reshape(()), reference.loss.reshape(()).to(loss.device)))
        self._compare_outputs(configuration, reference, errors)
        grad = self.input_gradients.gradient(self.mode.microbatches)
        if grad is not None and reference.inputs is not None:
            grad = self._gradient_over_cp(grad, of_inputs=self.input_gradients.leaf is not None)
            expected = configuration.part(reference.inputs, self.data_rank, self.data_size)
            if not _is_scattered(configuration, grad, expected):
                errors.add("input gradients", error_of(grad, expected))

    def _gradient_over_cp(self, grad: T, of_inputs: bool) -> T:
        """The gradient over all ranks of cp: a sum where each rank has all tokens, as of inputs, and of embeddings
        before the text of a model with a tower; else a concatenation."""
        context = context_of(self.model)
        if context is None:
            return grad
        if not of_inputs and grad.shape[1:2] != (context.length,):
            return gather_tokens(self.model, grad)
        context.group.all_reduce(grad := grad.clone())
        return grad

    def _compare_outputs(self, configuration: Configuration, reference: ReferenceValues, errors: Errors) -> None:
        """Compare every tensor, with the microbatches concatenated. Outputs that cannot be concatenated are skipped."""
        recorded = self.recorder.outputs
        if not recorded:
            return  # another stage has the outputs
        for index, full in enumerate(reference.outputs):
            if not configuration.is_comparable(full, self.mode):
                continue
            actual = [tensors[index] for tensors in recorded if len(tensors) > index]
            expected = configuration.part(full, self.data_rank, self.data_size)
            error = _output_error(actual, expected) if len(actual) == len(recorded) else float("inf")
            errors.add("outputs", error, f"output {index}" if index else "")

    def _gradients(self, configuration: Configuration, reference: ReferenceValues, errors: Errors) -> None:
        """Compare gradients. A missing one is set to zeros first, so that all ranks call the same collectives."""
        grads: dict[str, T] = {}
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            if name in reference.gradients:
                if parameter.grad is None:
                    errors.add("gradients", float("inf"), name)
                    errors.wrong[name] = float("inf")
                    parameter.grad = torch.zeros_like(parameter)
                grads[name] = full_value(self.model, name, parameter.grad)
            elif parameter.grad is not None:
                grads[name] = parameter.grad
        compare_named(errors, "gradients", grads, reference, set(parameters), self.bound)

    def _norm(self, configuration: Configuration, reference: ReferenceValues, errors: Errors) -> None:
        norm = self.applied.clip_grad_norm_(0.5 * float(reference.norm))
        expected = reference.norm.double().cpu().reshape(())
        errors.add("gradient norm", error_of(norm.double().cpu().reshape(()), expected))

    def _weights(self, configuration: Configuration, reference: ReferenceValues, errors: Errors) -> None:
        self.optimizer.step()
        weights = {name: full_value(self.model, name, parameter) for name, parameter in self.model.named_parameters()}
        compare_named(errors, "weights", weights, reference, set(weights), self.bound)


def _is_scattered(configuration: Configuration, grad: T, expected: T) -> bool:
    """Whether a dict of styles shards the sequence before the place where the gradient is taken."""
    plan = configuration.plan
    return plan is not None and plan.on_unclaimed == "leave" and grad.shape != expected.shape


def _output_error(actual: list[T], expected: T) -> float:
    """The error of an output that was computed in parts. A scalar has one part."""
    if any(not part.ndim for part in actual) != (not expected.ndim):
        return float("inf")
    return error_of(torch.cat(actual) if expected.ndim else actual[0], expected)


def apply(
    configuration: Configuration, mode: Mode, model: nn.Module, mesh: DeviceMesh, loss: Callable[[Any, Any], T]
) -> ParallelModel:
    run, plan = configuration.request.options, configuration.plan
    options = replace(mode.over(run), overlap=overlap_of(configuration, mode), dtype=None)
    if plan is not None:  # the model has the dtype to verify in already, whatever that of training is
        plan = replace(plan, options=replace(plan.options, dtype=None))
    applied_plan = configuration.request.plan if plan is None else plan
    return parallelize_model(model, mesh, applied_plan, options, loss=loss, count=configuration.count, trace=False)


def is_auto(configuration: Configuration) -> bool:
    """Whether the overlap is `auto`."""
    return configuration.request.options.overlap == "auto"


def overlap_of(configuration: Configuration, mode: Mode) -> str:
    """The overlap to run; `chunked` for `auto`, which would overlap nothing at these sizes, if the plan can overlap."""
    request, plan = configuration.request, configuration.plan
    if not is_auto(configuration) or plan is None or request.size("tp") == 1:
        return request.options.overlap
    facts = describe(configuration.model)
    resolved = resolve(plan, facts, request.mesh.only("tp"), replace(mode.over(request.options), overlap="chunked"))
    return "chunked" if any(True for _ in planned_call_sites(resolved, facts)) else request.options.overlap


class _OutputRecorder:
    """The loss of a step, which records the full outputs of each microbatch."""

    def __init__(self, configuration: Configuration, model: nn.Module):
        self.configuration, self.model = configuration, model
        self.outputs: list[list[T]] = []

    def __call__(self, output: Any, targets: Any) -> T:
        with torch.no_grad():
            tensors = [gather_tokens(self.model, _full(tensor)) for tensor in floating_in(output)]
            self.outputs.append([tensor.detach().clone() for tensor in tensors])
        if self.configuration.loss is not None:
            return self.configuration.loss(output, targets)
        return cross_entropy(logits_of(output), targets, reduction="sum")


def gather_tokens(model: nn.Module, x: T) -> T:
    """A tensor with this rank's tokens of cp, gathered to all tokens. A collective."""
    context = context_of(model)
    if context is None or x.ndim < 2 or x.shape[1] != sum(stop - start for start, stop in context.local_runs()):
        return x
    return gather_sequence(model, x)


def _full(tensor: T) -> T:
    return tensor.full_tensor() if isinstance(tensor, (ShardedLogits, DTensor)) else tensor


def full_value(module: nn.Module, name: str, value: Any) -> T:
    """The full tensor of a parameter or its gradient, however it is sharded. A collective over the ranks that store
    it."""
    full = unsharded(stored_like(module.get_parameter(name), value))
    return full.detach().clone() if full is value else full


class _TracedRunner:
    """A stage's runner that passes the microbatch to the tracer. A stage runs its microbatches in order."""

    def __init__(self, runner: Any, tracer: ModuleTracer, first_microbatch: int):
        self.runner, self.tracer, self.first_microbatch = runner, tracer, first_microbatch
        self.counts: dict[int, int] = {}

    def run(self, stage: int, *args: Any, **kwargs: Any) -> Any:
        index = self.counts[stage] = self.counts.get(stage, -1) + 1
        with self.tracer.microbatch(self.first_microbatch + index):
            return self.runner.run(stage, *args, **kwargs)
