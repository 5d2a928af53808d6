"""A plan and a model's names to a `ResolvedPlan`: one row a module and a parameter. Pure arithmetic, nothing is changed.

`apply`, `explain`, `verify` and `checkpoint` all read these rows, so what is explained is what runs.

Floor 2: torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from parallelize.errors import ParallelizeError, PlanError, Problem, did_you_mean, near, short_list
from parallelize.layout import Layout
from parallelize.plan.attributes import local_attributes
from parallelize.plan.layouts import LayoutMaker
from parallelize.plan.model import ModelFacts, ParameterFacts
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.schema import Plan, Region, Rule
from parallelize.plan.soundness import check_soundness
from parallelize.styles.contract import Contract, Edge, Use
from parallelize.styles.registry import Place, contract_of
from parallelize.styles.text import StyleText


@dataclass(frozen=True)
class ModuleRow:
    """What happens to one module. `attributes`: values that become local, by (dotted) attribute name."""

    fqn: str
    rule: Rule
    contract: Contract
    attributes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterRow:
    """What happens to one parameter, under its first name; `names` are all of them (ties)."""

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
    plan: Plan
    tp_size: int
    modules: dict[str, ModuleRow]
    parameters: dict[str, ParameterRow]
    region: RegionRow | None
    attributes: dict[str, dict[str, int]]  # module fqn -> attribute -> local value

    def restricted(self, model: ModelFacts) -> ResolvedPlan:
        """The rows of the modules and parameters that `model`, a part of the one resolved, holds."""
        rows = {}
        for row in self.parameters.values():
            mine = next((name for name in row.fact.names if name in model.owners), None)
            if mine is not None:
                fact = model.parameters[model.owners[mine]]
                rows[fact.fqn] = replace(row, fact=fact)
        return replace(
            self,
            modules={name: row for name, row in self.modules.items() if name in model.modules},
            parameters=rows,
            attributes={name: values for name, values in self.attributes.items() if name in model.modules},
        )


def resolve(plan: Plan, model: ModelFacts, tp_size: int) -> ResolvedPlan:
    """Match every rule, claim every parameter, and lay everything out.

    Raises: PlanError holding every problem found, in the order of the file.
    """
    return _Resolver(for_base_model(plan, model), model, tp_size).run()


def for_base_model(plan: Plan, model: ModelFacts) -> Plan:
    """The plan for a model without its head: rules of the base model lose their prefix, the others are left out."""
    if not plan.base or plan.base in model.aliases:
        return plan
    prefix = plan.base + "."

    def cut(name: str) -> str:
        return name.removeprefix(prefix)

    def mine(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cut(name) for name in names if name.startswith(prefix))

    region = plan.region and replace(plan.region, layers=cut(plan.region.layers), leave=cut(plan.region.leave))
    cuts = plan.cuts and replace(
        plan.cuts,
        layers=cut(plan.cuts.layers),
        first=mine(plan.cuts.first),
        last=mine(plan.cuts.last),
        every=mine(plan.cuts.every),
        skips=tuple((cut(source), cut(target)) for source, target in plan.cuts.skips),
    )
    return replace(
        plan,
        cuts=cuts,
        ties=tuple(replace(tie, members=mine(tie.members)) for tie in plan.ties if len(mine(tie.members)) > 1),
        zero_units=mine(plan.zero_units),
        recompute_units=mine(plan.recompute_units),
        attention=tuple((cut(name), kind) for name, kind in plan.attention if name.startswith(prefix)),
        rules=tuple(replace(rule, pattern=cut(rule.pattern)) for rule in plan.rules if rule.pattern.startswith(prefix)),
        local=tuple(replace(item, pattern=cut(item.pattern)) for item in plan.local if item.pattern.startswith(prefix)),
        region=region,
    )


class _Resolver:
    """Collects problems while it fills the rows."""

    def __init__(self, plan: Plan, model: ModelFacts, tp_size: int):
        self.plan, self.model, self.tp_size = plan, model, tp_size
        self.problems: list[Problem] = []
        self.layouts = LayoutMaker(plan, model, tp_size)

    def run(self) -> ResolvedPlan:
        module_rules, parameter_rules = self._match()
        region = self._region()
        modules = self._modules(module_rules, region)
        self._check_region(region, modules)
        self._check_vocabulary(modules)
        parameters = self._parameters(modules, parameter_rules)
        attributes, wrong = local_attributes(self.plan, self.model, self.layouts)
        self.problems += wrong
        if not self.problems:
            self.problems += check_soundness(self.plan, self.model, modules, parameters)
        if self.problems:
            raise PlanError(*self._told())
        return ResolvedPlan(self.plan, self.tp_size, modules, parameters, region, attributes)

    def _told(self) -> list[Problem]:
        """What to tell: each fact once, and one line where the plan is for another model altogether."""
        unmatched = [problem for problem in self.problems if problem.slug == "unmatched-rule"]
        needed = [rule for rule in self.plan.rules if not rule.optional]
        if len(unmatched) >= max(3, len(needed)):
            return [self._wrong_plan(len(unmatched))]
        return list({(p.slug, p.where, p.what): p for p in self.problems}.values())

    def _wrong_plan(self, count: int) -> Problem:
        model = self.model
        names = short_list(list(dict.fromkeys(generic(name) for name in model.aliases if name)), 8)
        return Problem(
            "wrong-plan",
            f"plan {self.plan.name} is for another model: {count} of its patterns match nothing",
            self.plan.source,
            (
                ("serves", short_list([*self.plan.model_types, *self.plan.classes]) or "no model type in particular"),
                ("model", f"{type(model.root).__name__}, model type {getattr(model.config, 'model_type', None)!r}"),
                ("modules", names),
            ),
            "choose another plan, or None to choose by the model; `parallelize plans` lists them",
        )

    # -- which rule serves which name -----------------------------------------------------------------------------

    def _match(self) -> tuple[dict[str, Rule], dict[str, Rule]]:
        modules: dict[str, Rule] = {}
        parameters: dict[str, Rule] = {}
        for rule in self.plan.rules:
            for name in self._names_of(rule):
                is_parameter = name in self.model.owners
                claimed, name = (parameters, name) if is_parameter else (modules, self.model.aliases[name])
                other = claimed.setdefault(name, rule)
                if other is not rule and str(other.style) != str(rule.style):
                    self._overlap(name, other, rule)
        return modules, parameters

    def _names_of(self, rule: Rule) -> Iterator[str]:
        names = [*self.model.aliases, *self.model.owners]
        for pattern in alternatives(rule.pattern):
            found = [name for name in names if matches(pattern, name)]
            if not found and not rule.optional:
                self._unmatched(rule, pattern, names)
            yield from found

    def _unmatched(self, rule: Rule, pattern: str, names: Iterable[str]) -> None:
        known = {generic(name) for name in names}
        close = near(pattern, known)
        self.problems.append(
            Problem(
                "unmatched-rule",
                f"{pattern!r} matches no module and no parameter",
                rule.where,
                fix="did you mean " + " or ".join(close) + "?" if close else "remove it, or mark it optional: `name?`",
            )
        )

    def _overlap(self, name: str, first: Rule, second: Rule) -> None:
        rows = (
            (first.where or "rule", f"{first.pattern}: {first.style}"),
            (second.where or "and rule", f"{second.pattern}: {second.style}"),
        )
        self.problems.append(
            Problem("overlapping-rules", f"two rules claim {generic(name)}", second.where, rows, "keep one of them")
        )

    # -- modules --------------------------------------------------------------------------------------------------

    def _region(self) -> RegionRow | None:
        region = self.plan.region
        if not self.plan.sequence_parallel:
            return None
        if region is None:
            self._no_region("the plan names no `sequence_parallel` region", "")
            return None
        layers = sorted(
            (name for name in self.model.modules if name.rpartition(".")[0] == region.layers),
            key=lambda name: int(name.rpartition(".")[2]) if name.rpartition(".")[2].isdigit() else 0,
        )
        if not layers:
            lists = {name.rpartition(".")[0] for name in self.model.modules if name.rpartition(".")[2].isdigit()}
            fix = did_you_mean(region.layers, lists) if lists else "name the list of layers"
            self._no_region(f"{region.layers!r} holds no layers in this model", region.where, fix)
            return None
        leave = region.leave if region.leave and region.leave in self.model.modules else layers[-1]
        return RegionRow(layers[0], leave, region.argument)

    def _no_region(self, what: str, where: str, fix: str = "") -> None:
        self.problems.append(
            Problem("no-region", what, where, fix=fix or "add `sequence_parallel: {layers: ...}`, or turn it off")
        )

    def _modules(self, rules: dict[str, Rule], region: RegionRow | None) -> dict[str, ModuleRow]:
        gathered = {name for name, rule in rules.items() if rule.style.word == "gather"}
        rows = {}
        for name, rule in rules.items():
            place = Place(
                sequence_parallel=region is not None and self._inside(name, region, self.plan.region),
                loss_parallel=self.plan.loss_parallel,
                fuse_loss=self.plan.fuse_loss,
                input_gathered=any(above in gathered for above in _above(name)),
            )
            if place.sequence_parallel and not place.input_gathered:
                self._check_sees_shards(name, rule)
            try:
                rows[name] = ModuleRow(name, rule, contract_of(rule.style, self.model.modules[name], place))
            except ParallelizeError as error:
                self.problems += [replace(problem, where=rule.where) for problem in error.problems]
        return rows

    def _check_sees_shards(self, name: str, rule: Rule) -> None:
        """A whole parameter that works on sequence shards has a partial gradient: `replicate` would leave it so."""
        partial = rule.style.options.get("gradient") == "partial"
        if rule.style.word == "replicate" and not partial and self.model.modules[name].shapes:
            what = f"{generic(name)} works on sequence shards, so each rank sees a part of its gradient"
            fix = "use `sequence`, which sums it where that is needed"
            self.problems.append(Problem("replicated-in-region", what, rule.where, fix=fix))

    def _check_vocabulary(self, modules: dict[str, ModuleRow]) -> None:
        """Loss parallelism needs a head that keeps its logits sharded, and says so."""
        if any(row.contract.leave is Edge.VOCABULARY for row in modules.values()):
            return
        for choice in ("loss_parallel", "fuse_loss"):
            if getattr(self.plan, choice):
                fix = f"give the head `colwise(output=vocabulary)`, or turn {choice} off"
                what = f"{choice} is on, and no rule keeps logits sharded over the vocabulary"
                self.problems.append(Problem("no-vocabulary-output", what, self.plan.source, fix=fix))

    def _check_region(self, region: RegionRow | None, modules: dict[str, ModuleRow]) -> None:
        """The region's own edges need their places free."""
        for name, side in ((region.enter, "enter"), (region.leave, "leave")) if region else ():
            row = modules.get(name)
            if row is not None and getattr(row.contract, side) is not Edge.NONE:
                what = f"{generic(name)} converts its own {side} edge, where sequence parallelism begins or ends"
                fix = "give the style to a module inside it, or move `sequence_parallel`'s borders"
                self.problems.append(Problem("region-on-edge", what, row.rule.where, fix=fix))

    def _inside(self, name: str, row: RegionRow, region: Region | None) -> bool:
        return region is not None and (name == row.leave or name.startswith(region.layers + "."))

    # -- parameters -----------------------------------------------------------------------------------------------

    def _parameters(self, modules: dict[str, ModuleRow], own: dict[str, Rule]) -> dict[str, ParameterRow]:
        rows: dict[str, ParameterRow] = {}
        unclaimed: list[ParameterFacts] = []
        for fact in self.model.parameters.values():
            claims = list(self._claims(fact, modules, own))
            if not claims and self.plan.unclaimed == "replicate":
                self._check_replicable(fact, modules)
                claims = [(Rule(fact.fqn, StyleText("replicate")), Use())]
            if not claims:
                unclaimed.append(fact)
                continue
            found = [row for rule, use in claims if (row := self._row(fact, rule, use)) is not None]
            if found:
                rows[fact.fqn] = found[0]
                self._check_tie(found)
        if unclaimed:
            self._unclaimed(unclaimed)
        return rows

    def _claims(
        self, fact: ParameterFacts, modules: dict[str, ModuleRow], own: dict[str, Rule]
    ) -> Iterator[tuple[Rule, Use]]:
        """Every rule that claims the parameter under any of its names (ties may be claimed once, or alike)."""
        for name in fact.names:
            owner, _, key = name.rpartition(".")
            row = modules.get(self.model.aliases[owner])
            if row is not None and row.contract.style != "gather":
                if name in own:
                    self._overlap(name, row.rule, own[name])
                yield row.rule, row.contract.uses.get(key, Use())
            if name in own:
                yield from self._claim_of_parameter(own[name], owner, fact.shape)

    def _claim_of_parameter(self, rule: Rule, owner: str, shape: tuple[int, ...]) -> Iterator[tuple[Rule, Use]]:
        """The claim of a rule that names the parameter itself."""
        facts = replace(self.model.modules[self.model.aliases[owner]], shapes={"value": shape})
        if rule.style.word not in ("replicate", "shard"):
            what = f"`{rule.style.word}` is for modules, and {rule.pattern!r} names a parameter"
            self.problems.append(Problem("wrong-module-for-style", what, rule.where, fix="`shard` or `replicate`"))
            return
        yield rule, contract_of(rule.style, facts, Place()).uses["value"]

    def _row(self, fact: ParameterFacts, rule: Rule, use: Use) -> ParameterRow | None:
        layout, problem = self.layouts.layout(fact, use, rule)
        if problem is not None:
            self.problems.append(problem)
            return None
        assert layout is not None
        return ParameterRow(fact, rule, layout, use.partial)

    def _check_tie(self, rows: list[ParameterRow]) -> None:
        first = rows[0]
        for other in rows[1:]:
            if other.layout != first.layout or other.partial != first.partial:
                names = short_list(first.fact.names)
                lines = ((first.rule.pattern, str(first.rule.style)), (other.rule.pattern, str(other.rule.style)))
                self.problems.append(
                    Problem(
                        "broken-tie",
                        f"{names} are one parameter, and its rules split it differently",
                        other.rule.where,
                        lines,
                        "give both a style that splits the same dim, such as `embedding` and `colwise`",
                    )
                )
                return

    def _check_replicable(self, fact: ParameterFacts, modules: dict[str, ModuleRow]) -> None:
        """A parameter that nobody claims, between sharded siblings, most likely sees sharded activations."""
        parent = fact.fqn.rpartition(".")[0]
        around = parent.rpartition(".")[0]
        for place in (parent, around):
            styles = {row.contract.style for name, row in modules.items() if name.rpartition(".")[0] == place}
            full = any(
                row.contract.leave is Edge.GATHER_LAST
                for name, row in modules.items()
                if name.rpartition(".")[0] == place
            )
            if place and {"colwise", "rowwise"} <= styles and not full:
                self.problems.append(
                    Problem(
                        "unclaimed-between-shards",
                        f"no rule claims {generic(fact.fqn)}, which stands beside sharded linears",
                        fix="write a plan that says `replicate`, `replicate(gradient=partial)` or `shard` for it",
                    )
                )
                return

    def _unclaimed(self, facts: list[ParameterFacts]) -> None:
        counts: dict[str, int] = {}
        for fact in facts:
            counts[generic(fact.fqn)] = counts.get(generic(fact.fqn), 0) + 1
        rows = tuple((name, f"{count} parameters" if count > 1 else "1 parameter") for name, count in counts.items())
        self.problems.append(
            Problem(
                "unclaimed-parameter",
                f"{len(facts)} parameters are claimed by no rule",
                self.plan.source,
                rows[:12],
                "give each a style: `sequence` for norms between blocks, `replicate` for what stays whole",
            )
        )


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
