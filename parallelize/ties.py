"""Parameters that are one and live on several pipeline stages: equal copies, whose gradients are summed.

A tie is found by identity before a model is cut, or declared in the plan. Within a stage one parameter serves all its names.
Across stages each copy sees its own uses alone, so its gradient is a part; the parts are added after ZeRO has reduced them
over the data axes (sums may be taken in any order), on whatever ZeRO has left of them, and so move 1/dp of the bytes where
gradients are split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize import _torch_private as private
from parallelize.errors import HandshakeError, PlanError, Problem, did_you_mean
from parallelize.groups import Group, group_for
from parallelize.handshake import digest
from parallelize.parameters import STAGE, StageMark
from parallelize.pipeline.cut import Cut, cut_of
from parallelize.plan.model import ModelFacts
from parallelize.plan.resolve import ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.sharding import record_of
from parallelize.zero.buckets import local, shown_like

T = torch.Tensor


@dataclass(frozen=True)
class TieGroup:
    """One parameter on several ranks of the pipeline.

    Attributes:
        name: of the tie. members: fqns, on whatever stage. local: this rank's own, as the model names them.
        group: the ranks that hold it, the owner first. reduce: "sum" or "none".
    """

    name: str
    members: tuple[str, ...]
    local: tuple[str, ...]
    group: Group
    reduce: str = "sum"

    @property
    def is_owner(self) -> bool:
        return self.group.rank == 0


class Ties:
    """The ties of a model that this rank has a part in."""

    def __init__(self, module: nn.Module, groups: list[TieGroup]):
        self.module, self.groups = module, groups
        self._summed: set[str] = set()

    def parameters(self, tie: TieGroup) -> list[nn.Parameter]:
        """This rank's copies: one, unless a plan ties parameters of one stage that are not the same object."""
        found = {id(p): p for p in (self.module.get_parameter(name) for name in tie.local)}
        return list(found.values())

    def copies(self) -> set[int]:
        """ids of the parameters that are counted elsewhere: all but the owner's first."""
        found: dict[int, None] = {}
        for tie in self.groups:
            for place, parameter in enumerate(self.parameters(tie)):
                if not tie.is_owner or place:
                    found[id(parameter)] = None
        return set(found)

    @torch.no_grad()
    def equalize(self) -> None:
        """Give every copy the owner's value. A collective over each tie's ranks."""
        for tie in self.groups:
            first, *others = (local(p) for p in self.parameters(tie))
            if first.is_meta:
                continue
            if tie.group.size > 1:
                value = first.contiguous()
                tie.group.broadcast(value, 0)
                first.copy_(value)
            for other in others:
                other.copy_(first)

    def reopen(self) -> None:
        """Backwards are about to add to gradients that were summed before: each copy keeps its share of them."""
        for tie in self.groups:
            if tie.name in self._summed:
                for parameter in self.parameters(tie):
                    if parameter.grad is not None:
                        local(parameter.grad).mul_(1.0 / (tie.group.size * len(self.parameters(tie))))
        self._summed.clear()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum each tie's gradients over its copies. Once a step, when all of its backwards have ended."""
        for tie in self.groups:
            if tie.reduce == "none":
                continue
            parameters = [p for p in self.parameters(tie) if p.requires_grad]
            if not parameters:
                continue
            for parameter in parameters:
                if parameter.grad is None:  # unused here, used elsewhere
                    parameter.grad = self._no_gradient(parameter)
            total = local(parameters[0].grad)
            for other in parameters[1:]:
                total.add_(local(other.grad))
            if tie.group.size > 1:
                tie.group.all_reduce(total)
            for other in parameters[1:]:
                local(other.grad).copy_(total)
            self._summed.add(tie.name)

    def _no_gradient(self, parameter: Any) -> Any:
        """Zeros, in the form in which ZeRO leaves gradients."""
        data = self.module.__dict__.get("_parallelize_data")
        shards = data.shards if data is not None and data.zero == 2 else ()
        shard = next((shard for shard in shards if shard.param is parameter), None)
        dtype = getattr(data.engine, "dtype", None) if data is not None else None
        dtype = dtype or parameter.dtype
        if shard is None or shard.spec is None:
            return shown_like(parameter, torch.zeros_like(local(parameter), dtype=dtype))
        own = torch.zeros_like(shard.rows(local(parameter)), dtype=dtype)
        return private.wrap(own, private.with_dtype(shard.spec, own))

    def check(self) -> None:
        """Compare the copies by digest. Raises: HandshakeError `ties-differ` on every rank of a tie whose copies differ."""
        for tie in self.groups:
            own = [digest(local(p)) for p in self.parameters(tie)]
            everyone = tie.group.all_gather(own[0]) if tie.group.size > 1 else own[0][None]
            if any(not torch.equal(one, everyone[0]) for one in (*everyone, *own)):
                what = f"copies of {tie.name} ({', '.join(tie.members)}) are not equal any more"
                raise HandshakeError(
                    Problem(
                        "ties-differ", what, fix="let one optimiser of one setting step all copies; then equalize()"
                    )
                )


def ties_of(module: nn.Module) -> Ties | None:
    """The ties across stages that `tie_parameters` has found."""
    return module.__dict__.get("_parallelize_ties")


def tie_parameters(module: nn.Module, plan: Plan | None = None) -> Ties | None:
    """Find the ties of a model that was cut, and make their copies equal. A collective over the pipeline.

    Parameters that were one object before the cut are tied; so are those that the plan's `ties:` name together.

    Returns: the ties, or None where no parameter lives on two stages.
    Raises: PlanError `unknown-parameter`, `tie-shapes-differ`, `tie-layouts-differ`.
    """
    cut, record = cut_of(module), record_of(module)
    declared = [] if plan is None else [(tie.name, tie.members, tie.reduce) for tie in plan.ties]
    if cut is None and not declared:
        return None
    if record is not None and record.whole is not None:
        _check_layouts(record.whole, declared)
    if cut is None:
        names = [(name, members, reduce) for name, members, reduce in declared]
        groups = [TieGroup(name, members, members, Group.alone(), reduce) for name, members, reduce in names]
    else:
        check_declared(cut.facts, plan)
        known = {name for _, members, _ in declared for name in members}
        found = [
            (fact.fqn, fact.names, "sum")
            for fact in cut.facts.parameters.values()
            if len(_ranks(cut, fact.names)) > 1 and not known & set(fact.names)
        ]
        groups = [group for one in [*declared, *found] if (group := _group(cut, *one)) is not None]
    if not groups:
        return None
    ties = module.__dict__["_parallelize_ties"] = Ties(module, groups)
    ties.equalize()
    return ties


def mark_stages(module: nn.Module) -> None:
    """Tell each parameter which pipeline it is a part of, and whether its gradient counts here in a norm: wrapping a model
    makes new parameters, so this comes last."""
    cut, ties = cut_of(module), ties_of(module)
    copies = ties.copies() if ties is not None else set()
    for parameter in module.parameters():
        if cut is not None:
            setattr(parameter, STAGE, StageMark(cut.group, id(parameter) not in copies))


def _ranks(cut: Cut, names: tuple[str, ...]) -> list[int]:
    """pp ranks that hold any of these, in order of their stages."""
    stages = sorted({stage for name in names if (stage := cut.stages.stage_of(name)) is not None})
    return list(dict.fromkeys(cut.places[stage] for stage in stages))


def _group(cut: Cut, name: str, members: tuple[str, ...], reduce: str) -> TieGroup | None:
    ranks = _ranks(cut, members)
    if cut.group.rank not in ranks:
        return None
    local = tuple(member for member in members if cut.present(member))
    group = Group.alone() if len(ranks) == 1 else Group(group_for([cut.group.ranks[rank] for rank in ranks]))
    return TieGroup(name, members, local, group, reduce)


def _check_layouts(whole: ResolvedPlan, declared: list[tuple[str, tuple[str, ...], str]]) -> None:
    """Copies can be summed only where tensor parallelism has cut them alike."""
    rows = {name: row for row in whole.parameters.values() for name in row.fact.names}
    for tie, members, _ in declared:
        layouts = {(rows[name].layout.dim, rows[name].layout.owned) for name in members if name in rows}
        if len(layouts) > 1:
            cuts = tuple((name, f"{rows[name].rule.style}: dim {rows[name].layout.dim}") for name in members)
            fix = "give them styles that cut the same dim: `embedding` and `colwise(output=vocabulary)`"
            raise PlanError(
                Problem("tie-layouts-differ", f"members of {tie} are cut differently over tp", "", cuts, fix)
            )


def check_declared(facts: ModelFacts, plan: Plan | None) -> None:
    """Raises: PlanError `unknown-parameter`, `tie-shapes-differ` for the ties that a plan declares."""
    problems = []
    for tie, members in [] if plan is None else [(tie.name, tie.members) for tie in plan.ties]:
        unknown = [name for name in members if name not in facts.owners]
        for name in unknown:
            what = f"tie {tie} names {name!r}, which is no parameter"
            problems.append(Problem("unknown-parameter", what, fix=did_you_mean(name, facts.owners)))
        known = [name for name in members if name not in unknown]
        shapes = {facts.parameters[facts.owners[name]].shape for name in known}
        if len(shapes) > 1:
            what = f"tie {tie} joins parameters of shapes {sorted(map(list, shapes))}"
            problems.append(Problem("tie-shapes-differ", what, fix="tie parameters of one shape"))
    if problems:
        raise PlanError(*problems)
