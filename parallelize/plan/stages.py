"""Which modules a pipeline stage owns: units in the order in which they are called, and where they are cut.

A unit is a module that one stage owns whole: those before the layers, each layer, those after them. A stage owns a run of
units. Pure arithmetic on names and counts.

Floor 2: torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallelize.errors import PlanError, Problem, did_you_mean, short_list
from parallelize.plan.model import ModelFacts
from parallelize.plan.pattern import matches
from parallelize.plan.schema import Cuts, Plan

Costs = Mapping[str, float] | Sequence[float]
Assignment = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Stages:
    """A cut of a model.

    Attributes:
        units: names in calling order. starts: the unit with which each stage begins. num_first: units before the layers.
        owners: parameter name (first names) -> the stages that own it; more than one where it is tied across stages.
        cuts: the part of the plan that this came from.
    """

    units: tuple[str, ...]
    starts: tuple[int, ...]
    num_first: int
    owners: dict[str, tuple[int, ...]]
    cuts: Cuts

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def bounds(self, stage: int) -> tuple[int, int]:
        """(first unit, one past the last unit) of a stage."""
        stop = self.starts[stage + 1] if stage + 1 < self.num_stages else len(self.units)
        return self.starts[stage], stop

    def stage_of_unit(self, unit: str) -> int:
        place = self.units.index(unit)
        return max(stage for stage, start in enumerate(self.starts) if start <= place)

    def stage_of(self, fqn: str) -> int | None:
        """The stage that owns a module or parameter name; None where it belongs to none (containers, `every`)."""
        unit = self.unit_of(fqn)
        return None if unit is None else self.stage_of_unit(unit)

    def unit_of(self, fqn: str) -> str | None:
        return next((unit for unit in self.units if _under(fqn, unit)), None)


def _under(name: str, above: str) -> bool:
    return name == above or above == "" or name.startswith(above + ".")


def cut_stages(
    plan: Plan | None,
    model: ModelFacts,
    num_stages: int,
    *,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
) -> Stages:
    """Cut a model into stages.

    Args:
        costs: of units, by name (patterns) or one a unit: the largest sum over a stage is made small. Default: parameters.
        assignment: the modules of each stage, explicitly, in calling order; `costs` and the plan's lists do not matter.

    Raises: PlanError `no-layers`, `more-stages-than-layers`, `unknown-module`, `unassigned-parameter`, `bad-costs`,
        `every-has-parameters`, `unknown-skip`.
    """
    if assignment is not None:
        cuts, units, num_first, starts = _assigned(plan, model, num_stages, assignment)
    else:
        cuts = cuts_of(plan, model)
        units, num_first = _units(cuts, model)
        starts = _balanced(units, num_first, cuts, model, num_stages, costs)
    stages = Stages(units, starts, num_first, {}, cuts)
    problems = [*_check_every(cuts, model), *_check_skips(cuts, units), *_check_reused(stages, model)]
    owners, unowned = {}, []
    for fact in model.parameters.values():
        found = {stage for name in fact.names if (stage := stages.stage_of(name)) is not None}
        owners[fact.fqn] = tuple(sorted(found))
        if not found:
            unowned.append(fact.fqn)
    if unowned:
        fix = (
            "name each (or its module) under `first:` or `last:` of the plan's `pipeline:`, or assign modules to stages"
        )
        what = f"{len(unowned)} parameters belong to no stage: {short_list(unowned, 6)}"
        problems.append(Problem("unassigned-parameter", what, cuts.where, fix=fix))
    if problems:
        raise PlanError(*problems)
    return replace(stages, owners=owners)


def cuts_of(plan: Plan | None, model: ModelFacts) -> Cuts:
    """What the plan says, filled up from the model's own order; without a word of it, the longest list of modules."""
    cuts = plan.cuts if plan is not None else None
    if cuts is None and plan is not None and plan.region is not None:
        cuts = Cuts(plan.region.layers, carry=(plan.region.argument,) if plan.region.argument else ())
    if cuts is None:
        cuts = Cuts(_longest_list(model))
    if not _children(cuts.layers, model):
        lists = {name.rpartition(".")[0] for name in model.modules if name.rpartition(".")[2].isdigit()}
        fix = did_you_mean(cuts.layers, lists) if lists else "name the list of layers"
        raise PlanError(Problem("no-layers", f"{cuts.layers!r} holds no layers in this model", cuts.where, fix=fix))
    if cuts.first or cuts.last or cuts.layers == "":
        return cuts
    before, after = _around(cuts.layers, model)
    every = set(cuts.every)
    keep = [[name for name in names if name not in every] for names in (before, after)]
    return replace(cuts, first=tuple(keep[0]), last=tuple(keep[1]))


def _longest_list(model: ModelFacts) -> str:
    lists: dict[str, int] = {}
    for name in model.modules:
        above, _, last = name.rpartition(".")
        if last.isdigit():
            lists[above] = lists.get(above, 0) + 1
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists if other)]
    if not outer:
        fix = "say `pipeline: {layers: ...}` in the plan, or assign modules to stages"
        raise PlanError(Problem("no-layers", "the model holds no list of layers", fix=fix))
    return max(outer, key=lambda name: lists[name])


def _children(name: str, model: ModelFacts) -> list[str]:
    """The direct children of a module, in the order in which they stand."""
    prefix = name + "." if name else ""
    return [n for n in model.modules if n and n.startswith(prefix) and "." not in n[len(prefix) :]]


def _around(layers: str, model: ModelFacts) -> tuple[list[str], list[str]]:
    """Modules with parameters that stand before and after the layers, at each level above them."""
    before: list[str] = []
    after: list[str] = []
    above, inner = layers.rpartition(".")[0], layers
    while True:
        siblings = _children(above, model)
        place = siblings.index(inner)
        held = [name for name in siblings if any(_under(fqn, name) for fqn in model.owners)]
        before = [name for name in held if siblings.index(name) < place] + before
        after = after + [name for name in held if siblings.index(name) > place]
        if not above:
            return before, after
        above, inner = above.rpartition(".")[0], above


def _units(cuts: Cuts, model: ModelFacts) -> tuple[tuple[str, ...], int]:
    names = [*cuts.first, *cuts.last]
    known = {*model.aliases, *model.owners}
    # `?`-like leniency: heads that a variant of the model lacks are left out, as in the plan's rules
    present = {name for name in names if name in known}
    first = tuple(name for name in cuts.first if name in present)
    last = tuple(name for name in cuts.last if name in present)
    return (*first, *_children(cuts.layers, model), *last), len(first)


def _count(unit: str, model: ModelFacts) -> int:
    return sum(math.prod(f.shape) for f in model.parameters.values() if any(_under(name, unit) for name in f.names))


def _balanced(
    units: tuple[str, ...], num_first: int, cuts: Cuts, model: ModelFacts, num_stages: int, costs: Costs | None
) -> tuple[int, ...]:
    num_layers = len(_children(cuts.layers, model))
    if num_stages > num_layers:
        raise PlanError(
            Problem(
                "more-stages-than-layers",
                f"{num_stages} stages for the {num_layers} layers of {cuts.layers or 'the model'!r}",
                cuts.where,
                fix=f"use at most {num_layers} stages (pp size times stages a rank)",
            )
        )
    each = _costs(units, model, costs)
    # what stands before the layers goes with the first of them, what stands after with the last
    last = num_first + num_layers - 1
    head, tail = sum(each[: num_first + 1]), sum(each[last:])
    inner = [
        head + (tail if num_layers == 1 else 0.0),
        *each[num_first + 1 : last],
        *([tail] if num_layers > 1 else []),
    ]
    return tuple(0 if place == 0 else num_first + place for place in split_evenly(inner, num_stages))


def _costs(units: tuple[str, ...], model: ModelFacts, costs: Costs | None) -> list[float]:
    if costs is None:
        return [float(_count(unit, model)) for unit in units]
    if isinstance(costs, Mapping):
        found = [next((cost for pattern, cost in costs.items() if matches(pattern, unit)), None) for unit in units]
        missing = [unit for unit, cost in zip(units, found, strict=True) if cost is None]
        dead = [pattern for pattern in costs if not any(matches(pattern, unit) for unit in units)]
    else:
        found = list(costs) if len(costs) == len(units) else []
        missing, dead = ([] if found else [f"{len(costs)} costs for {len(units)} units"]), []
    if missing or dead or any(cost is None or cost < 0 for cost in found):
        what = f"costs must be given for every unit, none negative: {short_list([*missing, *dead], 6)}"
        raise PlanError(Problem("bad-costs", what, fix="units: " + short_list(list(units), 12)))
    return [float(cost or 0.0) for cost in found]


def split_evenly(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where to begin each of `parts` runs, none empty, so that the largest sum is least. Source: linear partition."""
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    begin = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                worst = max(best[part - 1][start], total[stop] - total[start])
                if worst < best[part][stop]:
                    best[part][stop], begin[part][stop] = worst, start
    starts, stop = [], count
    for part in range(parts, 0, -1):
        stop = begin[part][stop]
        starts.append(stop)
    return tuple(reversed(starts))


def _assigned(
    plan: Plan | None, model: ModelFacts, num_stages: int, assignment: Assignment
) -> tuple[Cuts, tuple[str, ...], int, tuple[int, ...]]:
    problems = []
    if len(assignment) != num_stages or not all(assignment):
        what = f"modules are assigned to {sum(map(bool, assignment))} stages, and there are {num_stages}"
        problems.append(Problem("more-stages-than-layers", what, fix="give each stage one module or more"))
    names = [name for stage in assignment for name in stage]
    for name in names:
        if name not in model.aliases and name not in model.owners:
            what = f"{name!r} is no module of this model"
            problems.append(Problem("unknown-module", what, fix=did_you_mean(name, [n for n in model.aliases if n])))
        if names.count(name) > 1 or any(_under(name, other) for other in names if other != name):
            problems.append(Problem("repeated-module", f"{name!r} is assigned twice"))
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    given = plan.cuts if plan is not None and plan.cuts is not None else Cuts("")
    starts, at = [], 0
    for stage in assignment:
        starts.append(at)
        at += len(stage)
    return replace(given, first=(), last=()), tuple(names), 0, tuple(starts)


def _check_every(cuts: Cuts, model: ModelFacts) -> list[Problem]:
    problems = []
    for name in cuts.every:
        held = [fqn for fqn in model.owners if _under(fqn, name)]
        if held:
            fix = "give them to one stage, and name what the others need under `skips:`"
            what = f"{name!r} is on every stage, and holds parameters: {short_list(held, 4)}"
            problems.append(Problem("every-has-parameters", what, cuts.where, fix=fix))
    return problems


def _check_reused(stages: Stages, model: ModelFacts) -> list[Problem]:
    """A module that is called in several places runs on one stage only, and a layer that is another once more on none."""
    problems = []
    for name, first in model.aliases.items():
        if name == first or stages.num_stages == 1 or not any(_under(fqn, first) for fqn in model.owners):
            continue
        here, there = stages.stage_of(name), stages.stage_of(first)
        layer = bool(stages.cuts.layers) and name.rpartition(".")[0] == stages.cuts.layers
        if layer or (here is not None and there is not None and here != there):
            what = f"{name} is {first} once more, and a pipeline calls each module on one stage"
            fix = "give each layer weights of its own (tie parameters, not modules), or do without pp"
            problems.append(Problem("reused-module", what, stages.cuts.where, fix=fix))
    return problems[:4]


def _check_skips(cuts: Cuts, units: tuple[str, ...]) -> list[Problem]:
    return [
        Problem("unknown-skip", f"skip names {name!r}, which is no unit", cuts.where, fix=did_you_mean(name, units))
        for pair in cuts.skips
        for name in pair
        if name not in units
    ]
