"""The relation of the input, output and gradient of a module call to the full tensors, from the traces of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from parallelize.base.errors import ParallelizeError
from parallelize.base.layout import Layout
from parallelize.plan.model_facts import describe
from parallelize.plan.pattern import generic, matches
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ModuleRow, ParameterRow, ResolvedPlan
from parallelize.tools.verification.compare import FLOOR, Difference
from parallelize.tools.verification.configuration import Configuration, Mode
from parallelize.tools.verification.module_trace import ModuleCall, ModuleTrace
from parallelize.tools.verification.relations import Relation, error_of, relate

T = torch.Tensor
LOOSER = 100.0  # factor on the bound of results: a relation is a question of kind, not of accuracy


class Evidence:
    """The data about a run that differs: the reference's trace, the ranks' traces, and the resolved plan."""

    def __init__(
        self,
        configuration: Configuration,
        mode: Mode,
        reference: ModuleTrace,
        traces: Sequence[ModuleTrace],
        *,
        bound: float,
    ):
        self.configuration, self.reference, self.traces = configuration, reference, traces
        self.bound = bound * LOOSER
        self.calls_by_rank = [trace.by_key() for trace in traces]
        mesh = configuration.request.mesh
        self.groups = mesh.groups("tp") if "tp" in mesh.names else [(rank,) for rank in range(mesh.world_size)]
        self.model = describe(configuration.model)
        self.resolved = self._resolve(mode)
        self.has_pipeline = configuration.request.size("pp") > 1
        outputs = [call.output for call in reference.calls if call.output is not None and call.output.numel()]
        self.floor = FLOOR * max((float(output.abs().max()) for output in outputs), default=0.0)
        self._relations: dict[tuple, Relation | None] = {}

    def _resolve(self, mode: Mode) -> ResolvedPlan | None:
        plan, request = self.configuration.plan, self.configuration.request
        if plan is None or request.size("tp") == 1:
            return None
        try:
            return resolve(plan, self.model, request.mesh.only("tp"), mode.over(request.options))
        except ParallelizeError:
            return None

    # -- rules ---------------------------------------------------------------------------------------------------------

    def row(self, module: str) -> ModuleRow | None:
        """The module's row of the resolved plan."""
        return self.resolved.modules.get(self.model.module_fqns.get(module, module)) if self.resolved else None

    def parameter(self, name: str) -> ParameterRow | None:
        return self.resolved.parameters.get(self.model.parameter_fqns.get(name, name)) if self.resolved else None

    def weight_layout(self, module: str) -> Layout | None:
        row = self.parameter(f"{module}.weight")
        return row.layout if row is not None else None

    def has_parameters(self, module: str) -> bool:
        facts = self.model.modules.get(self.model.module_fqns.get(module, module))
        return facts is not None and bool(facts.shapes)

    def is_linear(self, module: str) -> bool:
        facts = self.model.modules.get(self.model.module_fqns.get(module, module))
        return facts is not None and facts.kind in ("linear", "conv1d")

    @cached_property
    def rowwise_parents(self) -> set[str]:
        """Modules that contain a rowwise linear, whose input must be a shard."""
        rows = self.resolved.modules.items() if self.resolved else ()
        return {name.rpartition(".")[0] for name, row in rows if row.contract.traits.sums_output}

    # -- calls ---------------------------------------------------------------------------------------------------------

    @cached_property
    def finished(self) -> list[ModuleCall]:
        """The reference's calls in the order in which they ended: children before their parent."""
        return sorted(self.reference.calls, key=lambda call: call.left)

    def locals_of(self, call: ModuleCall, which: str) -> list[T] | None:
        """The tensors of the ranks of the tp group that made this call. None where no group made it, or stored no
        tensors.

        which: "input", "output" or "grad".
        """
        for group in self.groups:
            tensors = [getattr(self.calls_by_rank[rank].get(call.key), which, None) for rank in group]
            present = [tensor for tensor in tensors if tensor is not None]
            if len(present) == len(group):
                return present
        return None

    def was_made(self, call: ModuleCall) -> bool:
        """Whether the call returned on some rank."""
        return any(call.key in calls and calls[call.key].left >= 0 for calls in self.calls_by_rank)

    def relation(self, call: ModuleCall, which: str = "output") -> Relation | None:
        """The relation of the ranks' tensors to the reference's. None where there is nothing to compare."""
        key = (call.key, which)
        if key not in self._relations:
            self._relations[key] = self._relate(call, which)
        return self._relations[key]

    def _relate(self, call: ModuleCall, which: str) -> Relation | None:
        full, locals_ = getattr(call, which), self.locals_of(call, which)
        if full is None or locals_ is None:
            return None
        if self.has_pipeline and any(not torch.isfinite(local).all() for local in locals_):
            return None  # computed from the output of a stage that this rank does not have
        floor = 0.0 if which == "grad" else self.floor
        return relate(locals_, full, self.bound, floor)

    def has_layout(self, call: ModuleCall, which: str, layout: Layout) -> bool:
        """Whether each rank's tensor is its part of the full tensor, by the layout, along the last dim."""
        full, locals_ = getattr(call, which), self.locals_of(call, which)
        dim = layout.dim
        if full is None or locals_ is None or dim is None or layout.shape[dim] != full.shape[-1]:
            return False
        for rank, local in enumerate(locals_):
            parts = [full[..., start:stop] for start, stop in layout.owned[rank]]
            if not parts or error_of(local, torch.cat(parts, -1), self.floor) > self.bound:
                return False
        return True

    def inside(self, call: ModuleCall) -> Iterator[ModuleCall]:
        """Calls within a call, in the order in which they began."""
        end = call.left if call.left >= 0 else float("inf")
        for other in self.reference.calls:
            if other.microbatch == call.microbatch and call.entered < other.entered < end:
                yield other

    def before(self, call: ModuleCall) -> list[ModuleCall]:
        """Calls that ended before a call began, the latest first.

        They are those inside the nearest enclosing module in which some of them have parameters.
        """
        earlier = [
            other
            for other in self.reference.calls
            if other.microbatch == call.microbatch and 0 <= other.left < call.entered
        ]
        parent = call.name
        while parent:
            parent = parent.rpartition(".")[0]
            siblings = [other for other in earlier if other.name.startswith(parent + "." if parent else "")]
            if any(self.has_parameters(other.name) for other in siblings):
                return sorted(siblings, key=lambda other: -other.left)
        return []


# -- naming ----------------------------------------------------------------------------------------------------------
# A `Difference` for a module: with the rule of the plan that matches it, and a fix.


def difference(
    evidence: Evidence, mode: Mode, module: str, kind: str, what: str, *, others: tuple[str, ...] = (), fix: str = ""
) -> Difference:
    """A difference at `module`, with the rules of this module and of other suspects."""
    rule, where = _rule_of(evidence, module)
    suspects: dict[str, str] = {}  # pattern of fqns to its rule, without the module's own
    for name in others:
        if generic(name) != generic(module):
            suspects.setdefault(generic(name), _rule_of(evidence, name)[0])
    return Difference(
        str(mode),
        module or "the model",
        kind,
        what,
        rule=rule,
        where=where,
        others=tuple(suspects.items()),
        fix=fix or _fix(evidence, module, kind),
    )


def _rule_of(evidence: Evidence, module: str) -> tuple[str, str]:
    """(rule, line in the plan file) of the module, or else of its attribute under `local`."""
    row = evidence.row(module)
    if row is not None:
        return f"{row.rule.pattern}: {row.rule.style}", row.rule.where
    plan = evidence.resolved.plan if evidence.resolved else None
    for item in plan.local if plan else ():
        if matches(item.pattern, module):
            return f"local {item.pattern}: {item.attribute}", item.where
    return ("no rule matches it", plan.source) if plan and evidence.has_parameters(module) else ("", "")


def _fix(evidence: Evidence, module: str, kind: str) -> str:
    row = evidence.row(module)
    if kind == "raised" and (row is None or row.contract.traits.shares_input) and not evidence.has_parameters(module):
        return (
            "list the head counts and widths that its forward reads under `local:`; check that each colwise module "
            "feeds a rowwise module"
        )
    if kind == "permuted-chunks":
        return "name the chunks in the order of the weight: `colwise(heads + kv_heads + kv_heads)`, or `chunks=2`"
    if row is None and evidence.has_parameters(module):
        return "write a rule for it"
    return ""
