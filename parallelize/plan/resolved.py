"""A resolved plan: one row for each module and parameter. Frozen data that `apply`, `explain`, `verify` and checkpoints read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from parallelize.layout import Layout
from parallelize.plan.model_facts import ModelFacts, ParameterFacts
from parallelize.plan.schema import Plan, Rule
from parallelize.styles.contract import Contract


@dataclass(frozen=True)
class ModuleRow:
    """What is applied to one module. `attributes`: local values, by (dotted) attribute name."""

    fqn: str
    rule: Rule
    contract: Contract
    attributes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterRow:
    """The layout of one parameter, under its first name; `fact.names` are all its names (ties).

    Attributes:
        partial: each rank has only a part of its gradient.
    """

    fact: ParameterFacts
    rule: Rule
    layout: Layout
    partial: bool

    @property
    def fqn(self) -> str:
        return self.fact.fqn


@dataclass(frozen=True)
class RegionRow:
    """The sequence-parallel region: entered at the input of `enter`, left at the output of `leave`."""

    enter: str
    leave: str
    argument: str = ""


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan resolved for one model and mesh.

    Attributes:
        plan: with the options of the caller.
        modules: by fqn, of modules that a rule matches.
        parameters: by first name, all of them.
        region: None without sequence parallelism.
        attributes: module fqn to attribute to local value.
    """

    plan: Plan
    tp_size: int
    modules: dict[str, ModuleRow]
    parameters: dict[str, ParameterRow]
    region: RegionRow | None
    attributes: dict[str, dict[str, int]]

    def restricted(self, model: ModelFacts) -> ResolvedPlan:
        """The rows of the modules and parameters of `model`, which is a part of the resolved one (a pipeline stage)."""
        rows = {}
        for row in self.parameters.values():
            local_name = next((name for name in row.fact.names if name in model.owners), None)
            if local_name is not None:
                fact = model.parameters[model.owners[local_name]]
                rows[fact.fqn] = replace(row, fact=fact)
        return replace(
            self,
            modules={name: row for name, row in self.modules.items() if name in model.modules},
            parameters=rows,
            attributes={name: values for name, values in self.attributes.items() if name in model.modules},
        )
