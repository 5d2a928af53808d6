"""A verification from its request to its result, on threads of this process or as one rank of an existing group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.errors import HandshakeError, ModelError, ParallelizeError, Problem
from parallelize.comm.meshes import build_mesh
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.model_facts import describe
from parallelize.plan.options import options_of
from parallelize.plan.resolve import resolve
from parallelize.tools.analysis.automatic_trace import check_by_trace
from parallelize.tools.verification import rank_messages
from parallelize.tools.verification.blame import blame
from parallelize.tools.verification.compare import Difference, Errors, ReferenceValues
from parallelize.tools.verification.configuration import (
    Comparison,
    Configuration,
    Mode,
    Request,
    build_configurations,
    choose_comparisons,
)
from parallelize.tools.verification.mesh_step import ApplyError, RankResult, is_auto, run_on_rank
from parallelize.tools.verification.module_trace import ModuleTrace
from parallelize.tools.verification.reference import check_repeats, is_a_sum, reference_step, trace_reference

# -- hidden gradients ------------------------------------------------------------------------------------------------
# Sharded weights whose gradients are too small beside the others to be compared: a wrong one would pass. The error of
# a gradient is relative to its largest element, or to a thousandth of the largest gradient of the model where that is
# more. A gradient that is smaller than the bound times that floor could be zero, or anything of its size, and no
# comparison would tell.


SLUG = "gradients-too-small"
_SEEN = 1e-2
"""The part of a gradient that a mistake changes at least, so that it must be told from rounding."""

_MOST = 0.5


@dataclass(frozen=True)
class HiddenGradients:
    """Attributes: names: of weights. share: their elements, of those of all sharded weights that have a gradient."""

    names: tuple[str, ...] = ()
    share: float = 0.0

    @property
    def is_most(self) -> bool:
        """Whether they are so many that nothing is proven."""
        return self.share > _MOST

    def __str__(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return f"gradients of sharded weights that are too small beside the others: {', '.join(self.names[:3])}{more}"


def hidden_gradients(comparison: Comparison, bound: float) -> HiddenGradients:
    """The sharded weights without a comparable gradient in any batch."""
    elements = _sharded_weights(comparison)
    trained = {name for name in elements if any(name in values.gradients for values in comparison.references)}
    hidden = [name for name in trained if not any(_is_seen(values, name, bound) for values in comparison.references)]
    total = sum(elements[name] for name in trained)
    return HiddenGradients(tuple(sorted(hidden)), sum(elements[name] for name in hidden) / max(1, total))


def _is_seen(values: ReferenceValues, name: str, bound: float) -> bool:
    gradient = values.gradients.get(name)
    if gradient is None or not gradient.numel():
        return False
    return _SEEN * float(gradient.abs().max()) > bound * values.floor("gradients", name)


def _sharded_weights(comparison: Comparison) -> dict[str, int]:
    """The elements of each weight that is sharded over `tp`; of none where styles of PyTorch were applied."""
    configuration = comparison.configurations[0]
    request = configuration.request
    if configuration.plan is None or request.size("tp") == 1:
        return {}
    try:
        options = comparison.mode.over(request.options)
        resolved = resolve(configuration.plan, describe(configuration.model), request.mesh.only("tp"), options)
    except ParallelizeError:  # which the ranks name
        return {}
    rows = resolved.parameters.values()
    return {row.fqn: prod(row.fact.shape) for row in rows if row.layout.dim is not None and len(row.fact.shape) > 1}


# -- runner ------------------------------------------------------------------------------------------


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
                results.append(_result_of_failed_plan(comparison, error))
                break
            results.append(run.result_of(comparison, by_rank))
        return run.result(results)
    finally:
        torch.set_num_threads(num_threads)


def _result_of_failed_plan(comparison: Comparison, error: ApplyError) -> ComparisonResult:
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


# -- traced modes ----------------------------------------------------------------------------------------------------
# Before a step runs on the mesh, the dims of the plan are followed through a forward, in each mode.


def trace_modes(configuration: Configuration) -> None:
    """Raises: PlanError with the mistakes of the plan."""
    request, plan, model = configuration.request, configuration.plan, configuration.model
    if plan is None or request.size("tp") == 1 or request.trace is False:
        return
    facts = describe(model)
    for sequence in dict.fromkeys(mode.sequence_parallel for mode in configuration.modes()):
        try:
            options = {"sequence_parallel": sequence, "ep": request.options.ep, "etp": request.options.etp}
            resolved = resolve(plan, facts, request.mesh.only("tp"), options_of(None, options))
        except ParallelizeError:
            return  # which the ranks will raise too, with all axes
        check_by_trace(model, resolved, request.trace, configuration.inputs)


# -- tolerance -------------------------------------------------------------------------------------------------------
# The bound on the difference of two correct runs: from the dtype, the length of sums, and how many sums follow each
# other. A plan only changes the order in which numbers are added. A sum of n rounded products has an error of about
# sqrt(n) * u relative to its terms [Higham, Mary: A New Approach to Probabilistic Rounding Error Analysis, SIAM J.
# Sci. Comput. 41(5), 2019], and the errors of d consecutive sums add up like a random walk, as sqrt(d). Products are
# accumulated in float32 at least. So in bfloat16 only what is stored between sums is rounded coarsely: once for each
# sum, and once for each rank's part of it. bound = sqrt(d) * (SAFETY * sqrt(n) * u_sum + STORED_SAFETY * sqrt(1 +
# ranks) * u_stored) The factors cover what this model leaves out: cancellation in the largest element of a tensor,
# softmax, norms. Correct plans of every shipped family stay five times below the bound in float64 and float32
# [measured: tests/tools/verification/test_verification.py]. In bfloat16 they have reached two thirds of it (gradients
# of query projections, over ten seeds), so only mistakes of a tenth and more can be told from rounding.


SAFETY = {torch.float64: 32.0, torch.float32: 8.0, torch.bfloat16: 32.0}
STORED_SAFETY = 4.0
_SUMS_OF_LAYER = 4.0  # consecutive sums in the forward of a layer; backward and norms add as many again


def rounding_bound(dtype: torch.dtype, longest_sum: int, depth: int, ranks: int) -> float:
    """The largest error, relative to a tensor's largest element, at which two runs are equal.

    longest_sum, depth: n and d above.
    """
    stored = torch.finfo(dtype).eps / 2
    summed = min(stored, torch.finfo(torch.float32).eps / 2)
    bound = SAFETY.get(dtype, 32.0) * math.sqrt(longest_sum) * summed
    if dtype.itemsize < 4:
        bound += STORED_SAFETY * math.sqrt(1 + ranks) * stored
    return math.sqrt(depth) * bound


def bound_of(model: nn.Module, dtype: torch.dtype, tokens: int, ranks: int) -> float:
    """The bound for one training step of a model on `tokens` tokens."""
    widths = [size for parameter in model.parameters() if parameter.ndim > 1 for size in parameter.shape]
    layers = max([1, *(len(inner) for inner in model.modules() if isinstance(inner, nn.ModuleList))])
    return rounding_bound(dtype, max([tokens, *widths]), int(layers * 4 * _SUMS_OF_LAYER) + 2, ranks)
