"""A resolved plan: every decision about a model on a mesh, over every axis, in one place. Frozen data.

Training, `explain`, `fit`, `lint`, `verify`, `describe_plan` and checkpoints read it, so that they cannot disagree.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from parallelize.base.layout import Layout, of_elements
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import ModelFacts, ParameterFacts
from parallelize.plan.options import Options
from parallelize.plan.schema import Plan, Rule, Tie
from parallelize.plan.stages import Stages
from parallelize.plan.styles.contract import Contract


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan resolved for one model, mesh and set of options.

    Attributes:
        plan: for this model, with complete options. Without rules where the model has no plan.
        facts: names, shapes and ties of the full model.
        mesh: the axes for which it is resolved.
        modules: over `tp`: by fqn, of modules that a rule matches.
        parameters: over `tp`: by first name, all of them. On a mesh without `tp` all are replicated.
        regions: none without sequence parallelism; in the order in which a forward runs through them.
        attributes: over `tp`: module fqn to attribute to local value.
        stages: over `pp`: which modules each stage owns. None where the model has no layers, and one stage.
        stage_ranks: the pp rank of each stage.
        ties: parameters with copies on several pp ranks, and those that the plan declares.
        attention: over `cp`: fqn of each module that attends to all tokens, to the kind of its attention.
        sequences: over `cp`: the module at whose call sequences are sharded; empty: the model itself.
        zero_units: of ZeRO 3: modules whose parameters are gathered together.
        recompute_units: modules that run again in backward, before `recompute_every` leaves some out.
    """

    plan: Plan
    facts: ModelFacts = field(repr=False)
    mesh: MeshSpec
    modules: dict[str, ModuleRow]
    parameters: dict[str, ParameterRow]
    regions: tuple[RegionRow, ...]
    attributes: dict[str, dict[str, int]]
    stages: Stages | None = None
    stage_ranks: tuple[int, ...] = (0,)
    ties: tuple[Tie, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    sequences: str = ""
    zero_units: tuple[str, ...] = ()
    recompute_units: tuple[str, ...] = ()

    @property
    def options(self) -> Options:
        """The complete options of the run."""
        return self.plan.options

    @property
    def tp_size(self) -> int:
        return self.mesh.ranks("tp")

    def with_options(self, **fields: Any) -> ResolvedPlan:
        """The same decisions with other values of options, which a later step of application was called with."""
        return replace(self, plan=replace(self.plan, options=replace(self.plan.options, **fields)))

    @property
    def cut_layers(self) -> str:
        """The fqn of the layers between which stages are cut; empty for one stage."""
        return self.stages.cuts.layers if self.stages is not None and len(self.stage_ranks) > 1 else ""

    def stage_of(self, fqn: str) -> int:
        """The stage that owns a module or parameter; 0 for what every stage has."""
        if self.stages is None or self.stages.num_stages == 1:
            return 0
        return self.stages.stage_of(fqn) or 0

    def pp_ranks(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The pp ranks that store any of these parameters, in the order of their stages."""
        stages = sorted({self.stage_of(name) for name in names})
        return tuple(dict.fromkeys(self.stage_ranks[stage] for stage in stages))

    def weight_layout(self, fqn: str) -> Layout | None:
        """The layout of the weight of a linear or embedding, in its elements, also where codes of several are one."""
        facts = self.facts.modules[fqn]
        name = f"{fqn}.{facts.weight_key}"
        row = self.parameters.get(name) or next((r for r in self.parameters.values() if name in r.fact.names), None)
        return None if row is None else of_elements(row.layout, row.fact.packs)

    def zero_unit_of(self, fqn: str) -> str:
        """The innermost ZeRO unit that contains a module or parameter; "" for the rest of the model."""
        within = (unit for unit in self.zero_units if fqn == unit or fqn.startswith(unit + "."))
        return max(within, key=len, default="")

    def restricted(self, model: ModelFacts) -> ResolvedPlan:
        """The rows of the modules and parameters of `model`, which is a part of the resolved one (a pipeline stage)."""
        rows = {}
        for row in self.parameters.values():
            local_name = next((name for name in row.fact.names if name in model.parameter_fqns), None)
            if local_name is not None:
                fact = model.parameters[model.parameter_fqns[local_name]]
                rows[fact.fqn] = replace(row, fact=fact)
        return replace(
            self,
            modules={name: row for name, row in self.modules.items() if name in model.modules},
            parameters=rows,
            attributes={name: values for name, values in self.attributes.items() if name in model.modules},
        )

    def structure(self) -> dict[str, str]:
        """What must be equal on every rank, as text by key."""
        facts = {f"parameter {key}": value for key, value in self.facts.structure().items()}
        facts |= {f"plan {key}": value for key, value in self.plan.facts().items()}
        facts |= {f"option {name}": str(value) for name, value in self.options.explicit().items()}
        if self.stages is not None:
            facts |= {"stages": str(self.stages.starts), "pipeline units": " ".join(self.stages.units)}
        facts |= {f"attention of {fqn}": kind for fqn, kind in self.attention.items()}
        facts |= {
            "sequences": self.sequences,
            "ranks of stages": str(self.stage_ranks),
            "ties": str([tie.members for tie in self.ties]),
        }
        facts |= {"ZeRO units": " ".join(self.zero_units), "recompute units": " ".join(self.recompute_units)}
        return facts

    def __deepcopy__(self, memo: dict) -> ResolvedPlan:
        return self


# -- rows ------------------------------------------------------------------------------------------------------------
# What a plan's rules say about one module, one parameter, and the sequence-parallel region. Frozen data. Torch-free.


PendingElements = tuple[tuple[int, ...], int]
"""(tp ranks that sum, number of elements)."""


@dataclass(frozen=True)
class ModuleRow:
    """The rule and the contract of one module."""

    fqn: str
    rule: Rule
    contract: Contract


@dataclass(frozen=True)
class ParameterRow:
    """The layout of one parameter over `tp`, under its first name; `fact.names` are all its names (ties).

    Attributes:
        axis: "tp"; or "ep" of an expert that is folded over the data axes too, whose layout is over `ep`.
        partial: each rank has only a part of its gradient.
        plain: no style of a dict names it, so that it stays a plain tensor.
    """

    fact: ParameterFacts
    rule: Rule
    layout: Layout
    partial: bool
    plain: bool = False
    axis: str = "tp"

    @property
    def fqn(self) -> str:
        return self.fact.fqn

    @property
    def is_summed(self) -> bool:
        """Whether any rank of `tp` has a pending reduction of the gradient: all ranks then know it only when a step
        ends."""
        if self.layout.num_ranks == 1 or self.axis == "ep":
            return False
        return self.partial or any(self.layout.shared(rank) for rank in range(self.layout.num_ranks))

    def pending(self, rank: int) -> tuple[PendingElements, ...]:
        """The pending reductions over `tp` of one rank's gradient."""
        layout = self.layout
        if layout.num_ranks == 1 or self.axis == "ep" or (layout.dim is None and not self.partial):
            return ()
        if self.partial:
            return ((tuple(range(layout.num_ranks)), prod(layout.shape)),)
        assert layout.dim is not None
        width = prod(layout.local_shape(rank)) // max(layout.local_size(rank), 1)
        return tuple((ranks, (stop - start) * width) for start, stop, ranks in layout.shared(rank))


@dataclass(frozen=True)
class RegionRow:
    """The sequence-parallel region: entered at the input of `enter`, left at the output of `leave`."""

    enter: str
    leave: str
    argument: str = ""
