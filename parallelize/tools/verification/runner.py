"""A verification from its request to its result, on threads of this process or as one rank of an existing group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import HandshakeError, ModelError, Problem
from parallelize.comm.meshes import build_mesh
from parallelize.plan.parameter_layouts import dotted
from parallelize.tools.verification import rank_messages
from parallelize.tools.verification.blame import blame
from parallelize.tools.verification.compare import Errors
from parallelize.tools.verification.configuration import Configuration, Mode, Request, build_configurations
from parallelize.tools.verification.hidden_gradients import SLUG, HiddenGradients, hidden_gradients
from parallelize.tools.verification.mesh_step import ApplyError, RankResult, is_auto, run_on_rank
from parallelize.tools.verification.mode_choice import Comparison, choose_comparisons
from parallelize.tools.verification.module_trace import ModuleTrace
from parallelize.tools.verification.reference import check_repeats, is_a_sum, reference_step, trace_reference
from parallelize.tools.verification.result import Difference
from parallelize.tools.verification.tolerance import bound_of
from parallelize.tools.verification.traced_modes import trace_modes

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonResult:
    """The result of one comparison over all ranks."""

    mode: Mode
    errors: Errors
    difference: Difference | None


@dataclass(frozen=True)
class RunResult:
    """The results of all comparisons, with the plan, sizes and bound that they have in common."""

    plan: str
    sizes: dict[str, int]
    bound: float
    comparisons: list[ComparisonResult]
    not_compared: tuple[str, ...] = ()
    hidden: HiddenGradients = field(default_factory=HiddenGradients)

    @property
    def equal(self) -> bool:
        return not self.hidden.is_most and all(comparison.errors.equal(self.bound) for comparison in self.comparisons)


class VerificationRun:
    """The comparisons of a request and their reference values. Every process builds its own."""

    def __init__(self, request: Request, device: str):
        self.request = request
        variants = [
            (configurations, [reference_step(configuration) for configuration in configurations])
            for configurations in build_configurations(request, device)
        ]
        self.configuration: Configuration = variants[0][0][0]
        trace_modes(self.configuration)
        tokens = max(each.rows * each.length for configurations, _ in variants for each in configurations)
        self.bound = bound_of(self.configuration.model, self.configuration.dtype, tokens, request.mesh.world_size)
        if not request.full_size:
            check_repeats(self.configuration, variants[0][1][0], self.bound)
        self.can_split = request.full_size or is_a_sum(self.configuration, variants[0][1][0], self.bound)
        if not self.can_split and request.data_ranks * request.fewest_microbatches > 1:
            what = f"the loss of the full batch is not the sum over its parts, and {request.mesh} computes it in parts"
            fix = "have `loss` return the sum over tokens or rows, and `count` what it is divided by"
            raise ModelError(Problem("loss-no-sum", what, fix=fix))
        self.comparisons = choose_comparisons(variants, self.can_split)

    def result_of(self, comparison: Comparison, by_rank: list[list[RankResult]]) -> ComparisonResult:
        """Merge the results of all ranks. The first batch that differs is searched for the module to blame.

        by_rank: the results of each rank, one for each batch. A rank that failed has fewer.
        """
        errors, first_wrong = Errors(), None
        for index in range(max(map(len, by_rank))):
            merged = _merged([results[index].errors for results in by_rank if len(results) > index])
            errors.merge(merged)
            if first_wrong is None and not merged.equal(self.bound):
                first_wrong = index, merged
        if first_wrong is None:
            return ComparisonResult(comparison.mode, errors, None)
        index, wrong = first_wrong
        configuration = comparison.configurations[index]
        reference = trace_reference(configuration, comparison.mode)
        traces = [results[index].trace if len(results) > index else ModuleTrace() for results in by_rank]
        difference = blame(configuration, comparison.mode, wrong, reference, traces, bound=self.bound)
        return ComparisonResult(comparison.mode, errors, difference)

    def result(self, comparisons: list[ComparisonResult]) -> RunResult:
        sizes, hidden = sizes_of(self.configuration), hidden_gradients(self.comparisons[0], self.bound)
        unseen = (*self._not_compared(), *((str(hidden),) if hidden.names else ()))
        return RunResult(_plan_name(self.configuration), sizes, self.bound, comparisons, unseen, hidden)

    def _not_compared(self) -> tuple[str, ...]:
        """What is not compared, because of the model."""
        names = []
        if not (self.can_split and self.configuration.can_split):
            names.append("several microbatches: the loss or the batch cannot be split")
        if not all(
            configuration.is_comparable(output, comparison.mode)
            for comparison in self.comparisons
            for configuration, reference in zip(comparison.configurations, comparison.references, strict=True)
            for output in reference.outputs
        ):
            names.append("outputs without a row for each row of the batch")
        if is_auto(self.configuration):
            names.append(
                "what `overlap=auto` chooses: it was run as `chunked`, because at these sizes it overlaps nothing"
            )
        arguments = inspect.signature(self.configuration.model.forward).parameters
        if "token_type_ids" in arguments and "token_type_ids" not in self.configuration.inputs:
            names.append("token types")
        if any(True for _ in self.configuration.model.buffers()):
            names.append("buffers")
        return tuple(names)


def nothing_seen(result: RunResult) -> Difference | None:
    """What to say of a run whose numbers are equal because most of them are too small to differ."""
    if not result.hidden.is_most:
        return None
    what = f"{result.hidden}: {result.hidden.share:.0%} of the elements of all of them, so that nothing is proven"
    fix = "inputs, a loss and weights by which they are as large as the others"
    return Difference(str(result.comparisons[0].mode), result.hidden.names[0], "not compared", what, fix=fix, slug=SLUG)


def _merged(errors: list[Errors]) -> Errors:
    merged = Errors()
    for each in errors:
        merged.merge(each)
    return merged


def _plan_name(configuration: Configuration) -> str:
    if configuration.plan is not None:
        return configuration.plan.name
    plan = configuration.request.plan
    return "none" if plan is None else type(plan).__name__


def sizes_of(configuration: Configuration) -> dict[str, int]:
    """Sizes of model and batch, as a report shows them."""
    sizes = {"parameters": sum(parameter.numel() for parameter in configuration.model.parameters())}
    config = getattr(configuration.model, "config", None)
    for label, name in (
        ("layers", "num_hidden_layers"),
        ("hidden", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("kv heads", "num_key_value_heads"),
        ("inner", "intermediate_size"),
        ("vocabulary", "vocab_size"),
    ):
        if isinstance(value := dotted(config, name), int):  # of some layers alone, it is none of the model
            sizes[label] = value
    return {**sizes, "batch": configuration.rows, "sequence": configuration.length}


def on_threads(request: Request, tell: ProgressCallback) -> RunResult:
    """Run all ranks as threads of this process."""
    from parallelize.tools.verification.threads import run_ranks

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # every rank is a thread
    try:
        run = VerificationRun(request, "cpu")
        results = []
        for comparison in run.comparisons:
            tell(f"{comparison.mode} on {request.mesh}")

            def body(_: int, comparison: Comparison = comparison) -> list[RankResult]:
                return run_on_rank(comparison, build_mesh("cpu", **dict(request.mesh.axes)), run.bound)

            try:
                by_rank = run_ranks(request.mesh.world_size, body, request.timeout_s)
            except ApplyError as error:
                results.append(_not_applied(comparison, error))
                break
            results.append(run.result_of(comparison, by_rank))
        return run.result(results)
    finally:
        torch.set_num_threads(num_threads)


def _not_applied(comparison: Comparison, error: ApplyError) -> ComparisonResult:
    problem = error.problems[0]
    difference = Difference(str(comparison.mode), "parallelize_model", "raised", problem.what, where=problem.where)
    return ComparisonResult(comparison.mode, Errors(failed=problem.what), difference)


def on_this_rank(request: Request, device: str, store: Any, tell: ProgressCallback) -> RunResult:
    """Run this process's rank in a group that is initialized. The result is the same on every rank.

    store: a store for this run alone. Results are exchanged through it, because collectives may not match.
    """
    run = VerificationRun(request, device)
    device_type = torch.device(device).type
    results: list[ComparisonResult] = []
    for number, comparison in enumerate(run.comparisons):
        tell(f"{comparison.mode} on {request.mesh}")
        local = run_on_rank(comparison, build_mesh(device_type, **dict(request.mesh.axes)), run.bound)
        by_rank = _gather_results(store, number, local, run.bound, request.timeout_s)
        results.append(run.result_of(comparison, by_rank))
        if results[-1].errors.failed:
            break  # after a rank has failed, collectives of its group cannot be used
    return run.result(results)


def _gather_results(
    store: Any, number: int, local: list[RankResult], bound: float, timeout_s: float
) -> list[list[RankResult]]:
    """Every rank's results of comparison `number`. Traces are exchanged only when something differs."""
    errors_message = rank_messages.errors_message([result.errors for result in local])
    messages = _exchange(store, f"errors/{number}", errors_message, timeout_s)
    errors_by_rank = [rank_messages.errors_from(message, rank) for rank, message in enumerate(messages)]
    if all(errors.equal(bound) for each in errors_by_rank for errors in each):
        return [[RankResult(errors, ModuleTrace()) for errors in each] for each in errors_by_rank]
    traces_message = rank_messages.traces_message([result.trace for result in local])
    messages = _exchange(store, f"traces/{number}", traces_message, timeout_s)
    traces_by_rank = [rank_messages.traces_from(message, rank) for rank, message in enumerate(messages)]
    return [
        [RankResult(errors, trace) for errors, trace in zip(*of_rank, strict=True)]
        for of_rank in zip(errors_by_rank, traces_by_rank, strict=True)
    ]


def _exchange(store: Any, key: str, message: bytes, timeout_s: float) -> list[bytes]:
    """Every rank's message. A store works even where a collective has failed."""
    store.set(f"{key}/{dist.get_rank()}", message)
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError):
        missing = [rank for rank, rank_key in enumerate(keys) if not store.check([rank_key])]
        what = f"ranks {missing} did not answer in {timeout_s:g} s"
        raise HandshakeError(Problem("ranks-missing", what, fix="look at those ranks' own errors")) from None
    return [store.get(rank_key) for rank_key in keys]
