"""The call sites of a plan at which a collective overlaps with matmuls, and how often each one did.

A call site is one call of a collective matmul. It belongs to a row linear, to a column linear that converts its own
input, or to a block whose converted input several column linears share (see `shared_input.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.comm.link_profile import AlgorithmChoice, LinearWork, LinkProfile
from parallelize.ops.matmul import symmetric_memory as symmetric
from parallelize.ops.matmul.linear_gradients import DeferredGradients
from parallelize.ops.matmul.overlapped_linear import algorithm_of, decide
from parallelize.plan.adapters import is_adapted
from parallelize.plan.block_formats import is_conv1d
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.records import require_record
from parallelize.state.step_results import as_instance


@dataclass(frozen=True)
class PlannedCallSite:
    """A call site as the plan defines it.

    Attributes:
        fqn: the fqn of the module: a linear, or the block whose input is shared.
        op: the collective matmul.
        requested: the value of `overlap`: "auto", "chunked" or "symm_mem".
        consumers: fqns of the column linears that read the input; empty for a row linear.
    """

    fqn: str
    op: str
    requested: str
    consumers: tuple[str, ...] = ()


_ROW_OPS = {Conversion.SCATTER_SEQUENCE: "linear_reduce_scatter", Conversion.REDUCE: "linear_all_reduce"}
_COLUMN_OPS = {Conversion.GATHER_SEQUENCE: "all_gather_linear", Conversion.COPY: "column_linear"}


def planned_call_sites(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[PlannedCallSite]:
    """The call sites of a plan on a model. Nothing is changed.

    There is none in a module that is gathered over `cp`, which computes other tokens than the collective's.
    """
    gathered = [fqn for fqn, kind in resolved.attention.items() if kind == "gathered"]
    for fqn, row in resolved.modules.items():
        if any(fqn == outer or fqn.startswith(f"{outer}.") for outer in gathered):
            continue
        contract = row.contract
        requested = contract.overlap or resolved.plan.options.overlap
        if requested == "off" or contract.defers_logits or is_adapted(fqn):
            continue
        if contract.traits.sums_output and contract.leave in _ROW_OPS and is_plain_linear(model.objects[fqn]):
            yield PlannedCallSite(fqn, _ROW_OPS[contract.leave], requested)
        elif contract.traits.splits_output and contract.enter in _COLUMN_OPS and is_plain_linear(model.objects[fqn]):
            if requested == "auto" and _has_siblings(fqn, resolved):
                continue  # they share one boundary conversion, which sends less than a collective matmul of each
            yield PlannedCallSite(fqn, _COLUMN_OPS[contract.enter], requested, (fqn,))
        elif contract.traits.shares_input and contract.runs_stock_forward and contract.enter in _COLUMN_OPS:
            consumers = tuple(_consumers(fqn, resolved, model))
            if consumers:
                yield PlannedCallSite(fqn, _COLUMN_OPS[contract.enter], requested, consumers)


def _has_siblings(fqn: str, resolved: ResolvedPlan) -> bool:
    """Whether other column linears of the module have the same input conversion, so that they likely share the
    input."""
    parent, enter = fqn.rpartition(".")[0], resolved.modules[fqn].contract.enter
    return any(
        other != fqn
        and other.rpartition(".")[0] == parent
        and row.contract.enter is enter
        and row.contract.traits.splits_output
        for other, row in resolved.modules.items()
    )


def _consumers(block: str, resolved: ResolvedPlan, model: ModelFacts) -> list[str]:
    """The column linears whose nearest gathered ancestor is this block; none where adapters read the same input."""
    blocks = {fqn for fqn, row in resolved.modules.items() if row.contract.traits.shares_input}
    consumers = []
    for fqn, row in resolved.modules.items():
        if (
            not row.contract.traits.splits_output
            or row.contract.enter is not Conversion.NONE
            or row.contract.overlap == "off"
        ):
            continue
        ancestor = fqn
        while ancestor and (ancestor == fqn or ancestor not in blocks):
            ancestor = ancestor.rpartition(".")[0]
        if ancestor == block and is_plain_linear(model.objects[fqn]):
            consumers.append(fqn)
    return [] if any(map(is_adapted, consumers)) else consumers


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the forward is known to be a linear: `nn.Linear`, or `transformers`' Conv1D (its weight is [in, out])."""
    known = type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and is_conv1d(module))
    return known and "forward" not in module.__dict__


def asks_for_symmetric_memory(resolved: ResolvedPlan) -> bool:
    """Whether a plan asks for symmetric memory anywhere: of the plan of the full model, the same on every rank."""
    return "symm_mem" in {resolved.plan.options.overlap, *(row.contract.overlap for row in resolved.modules.values())}


def check_call_sites(
    resolved: ResolvedPlan, model: ModelFacts, group: Group, device: torch.device
) -> tuple[PlannedCallSite, ...]:
    """The call sites of a plan, after checking that every requested overlap is possible. Nothing is changed.

    Raises: ModelError `no-overlap`, MeshError `no-symmetric-memory`.
    """
    call_sites = tuple(planned_call_sites(resolved, model))
    if group.size == 1:  # there is no communication to overlap
        return ()
    if asks_for_symmetric_memory(resolved):
        symmetric.require_cuda(device)
    _check_rules(resolved, model, call_sites)
    requested = {row.contract.overlap or resolved.plan.options.overlap for row in resolved.modules.values()} - {
        "off",
        "auto",
    }
    missing = requested - {call_site.requested for call_site in call_sites}
    if missing:
        traits = {fqn: row.contract.traits for fqn, row in resolved.modules.items()}
        linears = [fqn for fqn, trait in traits.items() if trait.splits_output or trait.sums_output]
        kinds = sorted({type(model.objects[fqn]).__name__ for fqn in linears}) or ["no column or row linears"]
        raise ModelError(
            Problem(
                "no-overlap",
                f"overlap={sorted(missing)[0]} is asked for, and there is no linear to overlap with a collective",
                rows=(("linears", f"{', '.join(kinds)}; nn.Linear and Conv1D can be, with their own forward"),),
                fix="overlap=off, or a plan with colwise and rowwise linears",
            )
        )
    return call_sites


_BY_NAME = ("chunked", "symm_mem")


def _check_rules(resolved: ResolvedPlan, model: ModelFacts, call_sites: tuple[PlannedCallSite, ...]) -> None:
    """Raises: ModelError `no-overlap` for a rule that names an algorithm where there is no call site."""
    overlapped = {call_site.fqn for call_site in call_sites}
    modules = resolved.modules
    wrong = [fqn for fqn, row in modules.items() if row.contract.overlap in _BY_NAME and fqn not in overlapped]
    if wrong:
        first = modules[wrong[0]]
        what = f"the rule of {wrong[0]} asks for overlap={first.contract.overlap}, which it cannot have"
        rows = (("module", type(model.objects[wrong[0]]).__name__), ("and", f"{len(wrong) - 1} more modules"))
        fix = "ask where the collective is: on `gather` or `rowwise` over nn.Linear or Conv1D with their own forward"
        raise ModelError(Problem("no-overlap", what, first.rule.where, rows, fix))


@dataclass
class CallSite:
    """One call site at run time.

    Attributes:
        planned: what the plan says.
        deferred: receives the weight gradients that backward defers.
        calls: the number of forwards so far.
        overlapped: the number of those whose collective overlapped with a matmul (in forward, or, for a replicated
            input, in backward).
        reason: the last algorithm with the reason for it, or "sync" with a reason.
        choices: the algorithm for each kind of call, with the link profile that it was chosen by.
    """

    planned: PlannedCallSite
    group: Group
    deferred: DeferredGradients
    calls: int = 0
    overlapped: int = 0
    reason: str = "not called yet"
    choices: dict[tuple[LinearWork, torch.dtype], tuple[LinkProfile | None, AlgorithmChoice]] = field(
        default_factory=dict
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> CallSite:
        return self  # copies of a model are counted together

    def algorithm(self, work: Callable[[], LinearWork], dtype: torch.dtype, device: torch.device) -> str:
        """The algorithm for this call, which is counted. A graph of any size names none, and the op chooses by the
        sizes of the call."""
        if self.planned.requested == "auto" and torch.compiler.is_compiling():
            return "auto" if (device.type, dtype) in self.group.profiles else "sync"
        choice = self._chosen(work, dtype, device)
        self.count(choice.algorithm != "sync", f"{choice.algorithm}: {choice.reason}")
        return choice.algorithm

    def _chosen(self, work: Callable[[], LinearWork], dtype: torch.dtype, device: torch.device) -> AlgorithmChoice:
        if self.planned.requested != "auto":
            return AlgorithmChoice(algorithm_of(self.planned.requested), "asked for")
        call = work()
        profile, choice = self.choices.get((call, dtype), (None, None))
        if choice is None or profile is not self.group.profiles.get((device.type, dtype)):
            choice = decide(self.group, dtype, device, call)
            self.choices[call, dtype] = self.group.profiles.get((device.type, dtype)), choice
        return choice

    def count(self, overlapped: bool, reason: str) -> None:
        """Count a forward."""
        if not torch.compiler.is_compiling():  # every count would recompile a graph
            self.calls += 1
            self.overlapped += overlapped
            self.reason = reason

    def had_no_effect(self, reason: str, fix: str) -> None:
        """Report that a forward overlapped nothing, for a reason that will not change.

        Raises: ModelError `overlap-unused` where an algorithm was requested by name.
        """
        self.reason = f"sync: {reason}"
        if self.planned.requested != "auto":
            what = f"overlap={self.planned.requested} of {self.planned.fqn} has no effect: {reason}"
            rows = (("linears", ", ".join(self.planned.consumers)),)
            raise ModelError(Problem("overlap-unused", what, rows=rows, fix=fix))


class Overlap:
    """The call sites of one model, and the weight gradients that they may defer.

    Attributes:
        microbatches: what was measured of microbatches beside each other, or "".
    """

    microbatches = ""

    def __init__(self) -> None:
        self.call_sites: list[CallSite] = []
        self.deferred = DeferredGradients()

    def add(self, planned: PlannedCallSite, group: Group) -> CallSite:
        call_site = CallSite(planned, group, self.deferred)
        self.call_sites.append(call_site)
        return call_site


def deferred_gradients(module: AnyModel) -> DeferredGradients:
    """The object that receives the weight gradients of a model's overlapped linears.

    Run backward inside `with deferred.deferring():`, and call `deferred.compute()` later.

    Args:
        module: a model that `parallelize_module` returned.

    Returns: the model's `DeferredGradients`, the same object at each call.
    Raises: ModelError `not-parallelized`.
    Cost: no communication.
    """
    module = module_of(module)
    overlap = as_instance(require_record(module).overlap, Overlap)
    assert overlap is not None
    return overlap.deferred
