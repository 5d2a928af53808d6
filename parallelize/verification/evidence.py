"""What the traces of all ranks say about one call of one module: how its input, output and gradient relate to the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from parallelize.errors import ParallelizeError
from parallelize.layout import Layout
from parallelize.plan.model import describe
from parallelize.plan.resolve import ModuleRow, ParameterRow, ResolvedPlan, resolve
from parallelize.verification.case import Case, Mode
from parallelize.verification.compare import FLOOR
from parallelize.verification.relate import Relation, error_of, relate
from parallelize.verification.watch import Seen, Trace

T = torch.Tensor
LOOSER = 100.0  # than the bound on results: a relation is a question of kind


class Evidence:
    """Everything that is known about a run that went wrong."""

    def __init__(self, case: Case, mode: Mode, reference: Trace, traces: Sequence[Trace], bound: float):
        self.case, self.reference, self.traces = case, reference, traces
        self.bound = bound * LOOSER
        self.by_key = [trace.by_key() for trace in traces]
        mesh = case.request.mesh
        self.groups = mesh.groups("tp") if "tp" in mesh.names else [(rank,) for rank in range(mesh.world_size)]
        self.model = describe(case.model)
        self.resolved = self._resolve(mode)
        self.pipelined = case.request.size("pp") > 1
        largest = [
            float(one.output.abs().max()) for one in reference.seen if one.output is not None and one.output.numel()
        ]
        self.floor = FLOOR * max(largest, default=0.0)
        self._relations: dict[tuple, Relation | None] = {}

    def _resolve(self, mode: Mode) -> ResolvedPlan | None:
        if self.case.plan is None or self.case.request.size("tp") == 1:
            return None
        plan = self.case.plan.with_options(sequence_parallel=mode.sequence_parallel, loss_parallel=mode.loss_parallel)
        try:
            return resolve(plan, self.model, self.case.request.size("tp"))
        except ParallelizeError:
            return None

    # -- rules ------------------------------------------------------------------------------------------------------------

    def row(self, module: str) -> ModuleRow | None:
        """What the plan says of a module itself."""
        return self.resolved.modules.get(self.model.aliases.get(module, module)) if self.resolved else None

    def parameter(self, name: str) -> ParameterRow | None:
        return self.resolved.parameters.get(self.model.owners.get(name, name)) if self.resolved else None

    def weight_layout(self, module: str) -> Layout | None:
        row = self.parameter(f"{module}.weight")
        return row.layout if row is not None else None

    def has_parameters(self, module: str) -> bool:
        facts = self.model.modules.get(self.model.aliases.get(module, module))
        return facts is not None and bool(facts.shapes)

    def is_linear(self, module: str) -> bool:
        facts = self.model.modules.get(self.model.aliases.get(module, module))
        return facts is not None and facts.kind in ("linear", "conv1d")

    @cached_property
    def contracting(self) -> set[str]:
        """Modules in which a rowwise linear wants parts of something."""
        rows = self.resolved.modules.items() if self.resolved else ()
        return {name.rpartition(".")[0] for name, row in rows if row.contract.style == "rowwise"}

    # -- calls ------------------------------------------------------------------------------------------------------------

    @cached_property
    def finished(self) -> list[Seen]:
        """The reference's calls in the order in which they ended: what is inside comes before what holds it."""
        return sorted(self.reference.seen, key=lambda one: one.left)

    def locals_of(self, call: Seen, which: str) -> list[T] | None:
        """The tensors of the ranks of the one tp group that made this call, or None where it was not made (or not kept)."""
        for group in self.groups:
            found = [getattr(self.by_key[rank].get(call.key), which, None) for rank in group]
            tensors = [one for one in found if one is not None]
            if len(tensors) == len(group):
                return tensors
        return None

    def was_made(self, call: Seen) -> bool:
        return any(one.get(call.key) is not None and one[call.key].left >= 0 for one in self.by_key)

    def relation(self, call: Seen, which: str = "output") -> Relation | None:
        """None where there is nothing to compare."""
        key = (call.key, which)
        if key not in self._relations:
            self._relations[key] = self._relate(call, which)
        return self._relations[key]

    def _relate(self, call: Seen, which: str) -> Relation | None:
        want, got = getattr(call, which), self.locals_of(call, which)
        if want is None or got is None:
            return None
        if self.pipelined and any(not torch.isfinite(one).all() for one in got):
            return None  # computed from a stage that is not here
        floor = 0.0 if which == "grad" else self.floor
        return relate(got, want, self.bound, floor)

    def lies_as(self, call: Seen, which: str, layout: Layout) -> bool:
        """Whether each rank's tensor is the part of the whole's last dim that a layout gives to it."""
        want, got = getattr(call, which), self.locals_of(call, which)
        dim = layout.dim
        if want is None or got is None or dim is None or layout.shape[dim] != want.shape[-1]:
            return False
        for rank, local in enumerate(got):
            parts = [want[..., start:stop] for start, stop in layout.owned[rank]]
            if not parts or error_of(local, torch.cat(parts, -1), self.floor) > self.bound:
                return False
        return True

    def inside(self, call: Seen) -> Iterator[Seen]:
        """Calls within a call, in order of entry."""
        end = call.left if call.left >= 0 else float("inf")
        yield from (
            o for o in self.reference.seen if o.microbatch == call.microbatch and call.entered < o.entered < end
        )

    def before(self, call: Seen) -> list[Seen]:
        """Calls that ended before a call began, in the nearest module around it where there are any with parameters; the
        nearest first."""
        around = call.name
        while around:
            around = around.rpartition(".")[0]
            found = [
                one
                for one in self.reference.seen
                if one.microbatch == call.microbatch
                and 0 <= one.left < call.entered
                and one.name.startswith(around + "." if around else "")
            ]
            if any(self.has_parameters(one.name) for one in found):
                return sorted(found, key=lambda one: -one.left)
        return []
