"""Which modules each pipeline stage owns.

A *unit* is a module that is never split between stages: each layer, and the modules before and after the layers. Units
are in calling order, and a stage owns consecutive ones. Everything here is arithmetic on names and counts.

Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from parallelize.base.errors import PlanError, Problem, did_you_mean, short_list
from parallelize.plan.adapters import prompt_encoders, with_prompts
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import matches
from parallelize.plan.schema import LONGEST_LIST, Cuts, Plan
from parallelize.plan.text_part import is_head, later_features, text_part

Costs = Mapping[str, float] | Sequence[float]
Assignment = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Stages:
    """A model split into stages.

    Attributes:
        units: fqns in calling order.
        starts: index of the first unit of each stage.
        num_first: number of units before the layers.
        cuts: the section of the plan that this was made from.
        names_in_units: names outside of all units, of modules that are in one by another name, to that name.
    """

    units: tuple[str, ...]
    starts: tuple[int, ...]
    num_first: int
    cuts: Cuts
    names_in_units: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def bounds(self, stage: int) -> tuple[int, int]:
        """(index of the first unit, one past the index of the last unit) of a stage."""
        stop = self.starts[stage + 1] if stage + 1 < self.num_stages else len(self.units)
        return self.starts[stage], stop

    def units_of(self, stage: int) -> tuple[str, ...]:
        """The units of a stage, in calling order."""
        start, stop = self.bounds(stage)
        return self.units[start:stop]

    def stage_of_unit(self, unit: str) -> int:
        """The stage that owns a unit."""
        index = self.units.index(unit)
        return max(stage for stage, start in enumerate(self.starts) if start <= index)

    def stage_of(self, fqn: str) -> int | None:
        """The stage that owns a module or parameter; None where no stage does (containers, `every`)."""
        unit = self.unit_of(fqn)
        return None if unit is None else self.stage_of_unit(unit)

    def unit_of(self, fqn: str) -> str | None:
        """The unit that contains a module or parameter, or None."""
        positions = self._positions
        containing = [positions[name] for name in _containing(fqn) if name in positions]
        if not containing:
            alias = next((self.names_in_units[name] for name in _containing(fqn) if name in self.names_in_units), None)
            return None if alias is None else self.unit_of(alias)
        return self.units[min(containing)]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {unit: index for index, unit in reversed(list(enumerate(self.units)))}


def _containing(name: str) -> Iterator[str]:
    """A name, and those of the modules that contain it, up to the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _within(name: str, ancestor: str) -> bool:
    return name == ancestor or ancestor == "" or name.startswith(ancestor + ".")


def cut_stages(
    plan: Plan | None,
    model: ModelFacts,
    num_stages: int,
    *,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
) -> Stages:
    """Split a model into stages.

    Args:
        plan: its section `pipeline:` names the layers and what runs around them. None: the longest list of modules.
        model: of the full model.
        num_stages: at most the number of layers.
        costs: of units, by pattern or one per unit in order; the largest sum over a stage is minimized. Default: the
            number of parameters.
        assignment: the modules of each stage in calling order, in place of `costs` and the lists of the plan.

    Raises: PlanError `no-layers`, `more-stages-than-layers`, `unknown-module`, `unassigned-parameter`, `bad-costs`,
        `every-has-parameters`, `unknown-skip`.
    """
    if assignment is not None:
        cuts, units, num_first, starts = _assigned(plan, model, num_stages, assignment)
    else:
        cuts = cuts_of(plan, model)
        units, num_first = _units(cuts, model)
        starts = _balanced(units, num_first, cuts, model, num_stages, costs)
    stages = _with_names_in_units(Stages(units, starts, num_first, cuts), model)
    problems = [*_check_every(cuts, model), *_check_skips(cuts, units), *_check_reused(stages, model)]
    unowned = [
        fact.fqn for fact in model.parameters.values() if all(stages.stage_of(name) is None for name in fact.names)
    ]
    if unowned:
        fix = (
            "name each (or its module) under `first:` or `last:` of the plan's `pipeline:`, or assign modules to stages"
        )
        what = f"{len(unowned)} parameters belong to no stage: {short_list(unowned, 6)}"
        problems.append(Problem("unassigned-parameter", what, cuts.where, fix=fix))
    if problems:
        raise PlanError(*problems)
    return stages


def _with_names_in_units(stages: Stages, model: ModelFacts) -> Stages:
    """The wrapper of a model with learned prompts refers to the embedding by a second name, for one."""
    second_names = ((name, first) for name, first in model.module_fqns.items() if name != first)
    names_in_units = {}
    for name, first in second_names:
        if stages.unit_of(name) is None and stages.unit_of(first) is not None:
            names_in_units[name] = first
    return replace(stages, names_in_units=names_in_units)


def cuts_of(plan: Plan | None, model: ModelFacts) -> Cuts:
    """The plan's section `pipeline:`, completed from the order of the model; without one, the longest list of
    modules."""
    cuts = plan.cuts if plan is not None else None
    region = plan.layers_region if plan is not None else None
    if cuts is None and region is not None:
        cuts = Cuts(region.layers, carry=(region.argument,) if region.argument else ())
    cuts = cuts or Cuts()
    if cuts.layers == LONGEST_LIST:
        cuts = replace(cuts, layers=region.layers if region is not None else longest_list(model))
    if not _children(cuts.layers, model):
        lists = {name.rpartition(".")[0] for name in model.modules if name.rpartition(".")[2].isdigit()}
        fix = did_you_mean(cuts.layers, lists) if lists else "name the list of layers"
        raise PlanError(Problem("no-layers", f"{cuts.layers!r} contains no layers in this model", cuts.where, fix=fix))
    if not cuts.first and not cuts.last and cuts.layers:
        before, after = _modules_around(cuts.layers, model)
        every = set(cuts.every)
        first, last = (tuple(name for name in names if name not in every) for names in (before, after))
        cuts = replace(cuts, first=first, last=last)
    if not cuts.skips:
        cuts = replace(cuts, skips=later_features(model, _children(cuts.layers, model)))
    return with_prompts(cuts, model, _children(cuts.layers, model)[-1])


def longest_list(model: ModelFacts) -> str:
    """The name of the module with the most numbered children; of a model without, of the dict with the most modules of
    one class.

    Raises: PlanError `no-layers`.
    """
    lists: dict[str, int] = {}
    for name in model.modules:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            lists[parent] = lists.get(parent, 0) + 1
    lists = lists or _dicts_of_layers(model)
    text = text_part(model)
    if text:  # of a model with a tower, the layers of the text
        lists = {name: size for name, size in lists.items() if _within(name, text)}
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists if other)]
    if not outer:
        fix = "write `pipeline: {layers: ...}` in the plan, or assign modules to stages"
        raise PlanError(Problem("no-layers", "the model has no list of layers", fix=fix))
    return max(outer, key=lambda name: lists[name])


def _dicts_of_layers(model: ModelFacts) -> dict[str, int]:
    """By name the sizes of `nn.ModuleDict`s whose modules are of one class, as layers by name are, and a pair of towers
    is not."""
    sizes = {}
    for name in (name for name, facts in model.modules.items() if facts.class_name == "ModuleDict"):
        children = _children(name, model)
        if len(children) > 1 and len({model.modules[child].class_name for child in children}) == 1:
            sizes[name] = len(children)
    return sizes


def _children(name: str, model: ModelFacts) -> list[str]:
    """The direct children of a module, in the order of the model."""
    prefix = name + "." if name else ""
    return [n for n in model.modules if n and n.startswith(prefix) and "." not in n[len(prefix) :]]


def _modules_around(layers: str, model: ModelFacts) -> tuple[list[str], list[str]]:
    """Modules with parameters before and after the layers, at each level above them."""
    before: list[str] = []
    after: list[str] = []
    parent, child = layers.rpartition(".")[0], layers
    text = text_part(model)
    while True:
        siblings = _children(parent, model)
        index = siblings.index(child)
        after_it = siblings[index + 1 :]
        if text and child == text:  # whatever is beside the text, but for a head, makes what the text is called with
            after_it = [name for name in after_it if is_head(name, model)]
        others = [name for name in siblings if name != child and name not in after_it]
        before = [name for name in others if _has_parameters(name, model)] + before
        after = after + [name for name in after_it if _has_parameters(name, model)]
        if not parent:
            return before, after
        parent, child = parent.rpartition(".")[0], parent


def _has_parameters(name: str, model: ModelFacts) -> bool:
    return any(_within(fqn, name) for fqn in model.parameter_fqns)


def _units(cuts: Cuts, model: ModelFacts) -> tuple[tuple[str, ...], int]:
    names = [*cuts.first, *cuts.last]
    known = {*model.module_fqns, *model.parameter_fqns}
    # like optional rules: a variant of the model may lack some of these modules, such as its head
    present = {name for name in names if name in known}
    first = tuple(name for name in cuts.first if name in present)
    last = tuple(name for name in cuts.last if name in present)
    return (*first, *_children(cuts.layers, model), *last), len(first)


def _num_parameters(units: Sequence[str], model: ModelFacts) -> list[int]:
    """Of each unit."""
    counts: Counter[str] = Counter()
    for fact in model.parameters.values():
        for unit in {containing for name in fact.names for containing in _containing(name)}:
            counts[unit] += math.prod(fact.shape)
    return [counts[unit] for unit in units]


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
    unit_costs = _costs(units, model, costs)
    # units before the layers are in the stage of the first layer, units after them in the stage of the last
    layer_costs = unit_costs[num_first : num_first + num_layers]
    layer_costs[0] += sum(unit_costs[:num_first])
    layer_costs[-1] += sum(unit_costs[num_first + num_layers :])
    return tuple(0 if layer == 0 else num_first + layer for layer in split_evenly(layer_costs, num_stages))


def _costs(units: tuple[str, ...], model: ModelFacts, costs: Costs | None) -> list[float]:
    if costs is None:
        return [float(count) for count in _num_parameters(units, model)]
    if isinstance(costs, Mapping):
        values = [next((cost for pattern, cost in costs.items() if matches(pattern, unit)), None) for unit in units]
        wrong = [unit for unit, cost in zip(units, values, strict=True) if cost is None]
        wrong += [pattern for pattern in costs if not any(matches(pattern, unit) for unit in units)]
    else:
        values = list(costs)
        wrong = [] if len(costs) == len(units) else [f"{len(costs)} costs for {len(units)} units"]
    if wrong or any(cost is None or cost < 0 for cost in values):
        what = f"every unit must have a cost, and none may be negative: {short_list(wrong, 6)}"
        raise PlanError(Problem("bad-costs", what, fix="units: " + short_list(list(units), 12)))
    return [float(cost or 0.0) for cost in values]


def split_evenly(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """The start index of each of `parts` consecutive runs, none empty, such that the largest sum is minimal.

    Source: linear partition by dynamic programming, O(parts * n^2).
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    best_start = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                worst = max(best[part - 1][start], total[stop] - total[start])
                if worst < best[part][stop]:
                    best[part][stop], best_start[part][stop] = worst, start
    starts, stop = [], count
    for part in range(parts, 0, -1):
        stop = best_start[part][stop]
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
        if name not in model.module_fqns and name not in model.parameter_fqns:
            what = f"{name!r} is not a module of this model"
            problems.append(
                Problem("unknown-module", what, fix=did_you_mean(name, [n for n in model.module_fqns if n]))
            )
        if names.count(name) > 1 or any(_within(name, other) for other in names if other != name):
            problems.append(Problem("repeated-module", f"{name!r} is assigned twice"))
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    cuts = plan.cuts if plan is not None and plan.cuts is not None else Cuts("")
    prompts = [name for name in prompt_encoders(model) if name not in names]
    lengths = [len(stage) for stage in assignment]
    lengths[0] += len(prompts)
    starts = tuple(accumulate(lengths[:-1], initial=0))
    cuts = with_prompts(replace(cuts, first=(), last=()), model, names[-1])
    return replace(cuts, first=()), (*prompts, *names), 0, starts


def _check_every(cuts: Cuts, model: ModelFacts) -> list[Problem]:
    problems = []
    for name in cuts.every:
        parameters = [fqn for fqn in model.parameter_fqns if _within(fqn, name)]
        if parameters:
            fix = "name the module under `first:` or `last:`, and what other stages need of it under `skips:`"
            what = f"{name!r} is on every stage, and has parameters: {short_list(parameters, 4)}"
            problems.append(Problem("every-has-parameters", what, cuts.where, fix=fix))
    return problems


def _check_reused(stages: Stages, model: ModelFacts) -> list[Problem]:
    """A reused module must be on one stage, and a layer must not be another layer."""
    problems = []
    for name, first in model.module_fqns.items():
        if name == first or stages.num_stages == 1 or not _has_parameters(first, model):
            continue
        is_layer = bool(stages.cuts.layers) and name.rpartition(".")[0] == stages.cuts.layers
        owning = {stage for fqn in (name, first) if (stage := stages.stage_of(fqn)) is not None}
        if is_layer or len(owning) > 1:
            what = f"{name} is the same module as {first}, and a pipeline calls each module on one stage only"
            fix = "make each layer a module of its own (tie parameters, not modules), or do not use pp"
            problems.append(Problem("reused-module", what, stages.cuts.where, fix=fix))
    return problems[:4]


def _check_skips(cuts: Cuts, units: tuple[str, ...]) -> list[Problem]:
    return [
        Problem(
            "unknown-skip", f"`skips` names {name!r}, which is not a unit", cuts.where, fix=did_you_mean(name, units)
        )
        for pair in cuts.skips
        for name in pair
        if name not in units
    ]
