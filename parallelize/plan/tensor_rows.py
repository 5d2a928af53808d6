"""The rules of a plan over `tp`: a row for each module and parameter, by names and shapes. Nothing is changed.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from parallelize.base.errors import ParallelizeError, PlanError, Problem, did_you_mean, near, short_list
from parallelize.base.layout import replicated
from parallelize.plan.adapters import layer_name
from parallelize.plan.expert_order import wrong_orders
from parallelize.plan.local_rows import Attributes, local_attributes, with_local_inputs
from parallelize.plan.model_facts import ModelFacts, ParameterFacts, is_sequential
from parallelize.plan.parameter_layouts import LayoutMaker
from parallelize.plan.pattern import alternatives, generic, is_default, matches
from parallelize.plan.resolved import ModuleRow, ParameterRow, RegionRow
from parallelize.plan.schema import Plan, RegionBounds, Rule
from parallelize.plan.soundness import check_soundness
from parallelize.plan.styles.contract import Conversion, Traits, Use
from parallelize.plan.styles.style import StyleContext, StyleText, contract_of


@dataclass(frozen=True)
class TensorRows:
    """What a plan says about the axis `tp`; the fields are those of `ResolvedPlan`."""

    modules: dict[str, ModuleRow]
    parameters: dict[str, ParameterRow]
    regions: tuple[RegionRow, ...]
    attributes: dict[str, dict[str, int]]


def tensor_rows(plan: Plan, model: ModelFacts, tp_size: int, attributes: Attributes | None = None) -> TensorRows:
    """Match every rule, assign a rule to every parameter, and make all layouts.

    Args:
        plan: for this model (`for_model`), with complete options.
        model: names, shapes and ties, of a model on any device.
        tp_size: ranks of the axis `tp`.
        attributes: those of a model whose modules have them already. None: made from its full ones.

    Raises:
        PlanError: all problems at once, in the order of the file.
    """
    return _Resolver(plan, model, tp_size).run(attributes)


LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Fields of a config by which layers are skipped at random in training."""

_WRAPPERS = 3  # one inside the other: that of adapters, its tuner, and torch.compile


class _Resolver:
    """Makes the rows, and collects problems on the way."""

    def __init__(self, plan: Plan, model: ModelFacts, tp_size: int):
        self.plan, self.model, self.tp_size = plan, model, tp_size
        self.problems: list[Problem] = []
        self.layouts = LayoutMaker(plan, model, tp_size)

    def run(self, attributes: Attributes | None) -> TensorRows:
        module_rules, parameter_rules = self._match()
        regions = self._regions()
        modules, problems = with_local_inputs(self.plan, self._modules(module_rules, regions), self.layouts)
        self.problems += problems
        for region in regions:
            self._check_region(region, modules)
        self._check_vocabulary(modules)
        self._check_experts(modules)
        parameters = self._parameters(modules, parameter_rules)
        if attributes is None:
            attributes, problems = local_attributes(self.plan, self.model, self.layouts)
            self.problems += problems
        if not self.problems and self.plan.on_unclaimed != "leave":  # PyTorch's styles say each layout themselves
            self.problems += check_soundness(self.plan, self.model, modules, parameters)
        if self.problems:
            raise PlanError(*self._reported())
        return TensorRows(modules, parameters, regions, attributes)

    def _reported(self) -> list[Problem]:
        """The problems without repetition, or a single one where the plan is for another model."""
        unmatched = [problem for problem in self.problems if problem.slug == "unmatched-rule"]
        needed = [rule for rule in self.plan.rules if not rule.optional]
        if len(unmatched) >= max(3, len(needed)):
            return [self._wrong_plan(len(unmatched))]
        return list({(p.slug, p.where, p.what): p for p in self.problems}.values())

    def _wrapped(self) -> str:
        """The module inside that the plan fits, because another one wraps the model; empty where there is none."""
        needed = [pattern for rule in self.plan.rules if not rule.optional for pattern in alternatives(rule.pattern)]
        for inner in sorted(filter(None, self.model.modules), key=lambda name: name.count(".")):
            if inner.count(".") > _WRAPPERS:
                return ""
            names = [name.removeprefix(f"{inner}.") for name in self.model.module_fqns if name.startswith(f"{inner}.")]
            if needed and all(any(matches(pattern, name) for name in names) for pattern in needed):
                return inner
        return ""

    def _wrong_plan(self, count: int) -> Problem:
        model = self.model
        if inner := self._wrapped():
            kind = type(model.root).__name__
            what = f"plan {self.plan.name} is for {inner}, which a {kind} wraps"
            fix = (
                "plan first, then wrap: parallelize_module(model, ...), then torch.compile(model); or plan "
                f"model.{inner}"
            )
            return Problem("wrapped-model", what, self.plan.source, fix=fix)
        names = short_list(list(dict.fromkeys(generic(name) for name in model.module_fqns if name)), 8)
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

    # -- rules and names ------------------------------------------------------------------------------------------

    def _match(self) -> tuple[dict[str, Rule], dict[str, Rule]]:
        modules: dict[str, Rule] = {}
        parameters: dict[str, Rule] = {}
        for rule in self.plan.rules:
            for name in () if is_default(rule.pattern) else self._names_of(rule):
                is_parameter = name in self.model.parameter_fqns
                rules, name = (parameters, name) if is_parameter else (modules, self.model.module_fqns[name])
                other = rules.setdefault(name, rule)
                if other is not rule and str(other.style) != str(rule.style):
                    self._overlap(name, other, rule)
        self._add_defaults(modules, parameters)
        return modules, parameters

    def _add_defaults(self, modules: dict[str, Rule], parameters: dict[str, Rule]) -> None:
        """Rules `encoder.**` claim the modules with parameters that no other rule claims; the innermost one counts."""
        defaults = [rule for rule in self.plan.rules if is_default(rule.pattern)]
        by_rules = {*modules}
        for rule in sorted(defaults, key=lambda rule: -rule.pattern.count(".")):
            names = [
                name
                for name in self.model.modules
                if name not in modules and not self._is_claimed(name, by_rules, parameters)
            ]
            claimed = [name for name in names if any(matches(pattern, name) for pattern in alternatives(rule.pattern))]
            modules |= dict.fromkeys(claimed, rule)
            if not claimed and not rule.optional:
                what = f"{rule.pattern!r} is a default for modules that no other rule claims, and there are none"
                self.problems.append(Problem("unmatched-rule", what, rule.where, fix="remove it, or write `**?`"))

    def _is_claimed(self, name: str, modules: set[str], parameters: dict[str, Rule]) -> bool:
        """Whether rules claim a parameter of a module, by any of its names; also where it has no parameters, or none of
        the part of a model that is planned later."""
        fqns = (f"{name}.{key}" if name else key for key in self.model.modules[name].shapes)
        own = {self.model.parameter_fqns[fqn] for fqn in fqns if fqn in self.model.parameter_fqns}
        names = [other for fqn in own for other in self.model.parameters[fqn].names]
        owning_modules = {self.model.module_fqns[other.rpartition(".")[0]] for other in names}
        return not own or not owning_modules.isdisjoint(modules) or any(other in parameters for other in names)

    def _names_of(self, rule: Rule) -> Iterator[str]:
        names = [*self.model.module_fqns, *self.model.parameter_fqns]
        for pattern in alternatives(rule.pattern):
            is_name = pattern in self.model.module_fqns or pattern in self.model.parameter_fqns
            matching = [pattern] if is_name else [name for name in names if matches(pattern, name)]
            if not matching and not rule.optional:
                self._unmatched(rule, pattern, names)
            yield from matching

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

    def _regions(self) -> tuple[RegionRow, ...]:
        """Those of the model: an encoder alone has one of two."""
        # a dict of styles says each layout itself
        if not self.plan.options.sequence_parallel or self.plan.on_unclaimed == "leave":
            return ()
        if not self.plan.regions:
            self._no_region("the plan names no `sequence_parallel` region", "")
            return ()
        self._check_skipped_layers()
        rows = tuple(row for row in map(self._region, self.plan.regions) if row is not None)
        if not rows:
            region = self.plan.regions[0]
            lists = {name.rpartition(".")[0] for name in self.model.modules if name.rpartition(".")[2].isdigit()}
            fix = did_you_mean(region.layers, lists) if lists else "name the list of layers"
            self._no_region(f"{region.layers!r} contains no layers in this model", region.where, fix)
        return rows

    def _check_skipped_layers(self) -> None:
        """A forward that skips the first or last layer would not enter or leave the region."""
        for name in LAYER_DROPS:
            rate = getattr(self.model.config, name, None)
            if isinstance(rate, float) and rate > 0:
                what = (
                    f"{name} is {rate}: a forward that skips the first or last layer would not enter or leave the "
                    "sequence-parallel region"
                )
                fix = f"{name}=0.0, or sequence_parallel=False"
                self.problems.append(Problem("skipped-layers", what, self.plan.source, fix=fix))

    def _region(self, region: RegionBounds) -> RegionRow | None:
        layers = sorted(
            (name for name in self.model.modules if name.rpartition(".")[0] == region.layers),
            key=lambda name: int(name.rpartition(".")[2]) if name.rpartition(".")[2].isdigit() else 0,
        )
        if not layers:
            return None
        leave = region.leave if region.leave and region.leave in self.model.modules else layers[-1]
        return RegionRow(layers[0], leave, region.argument)

    def _no_region(self, what: str, where: str, fix: str = "") -> None:
        self.problems.append(
            Problem("no-region", what, where, fix=fix or "add `sequence_parallel: {layers: ...}`, or turn it off")
        )

    def _modules(self, rules: dict[str, Rule], regions: tuple[RegionRow, ...]) -> dict[str, ModuleRow]:
        gathered = {name for name, rule in rules.items() if rule.style.traits.shares_input}
        full = {name for name, rule in rules.items() if rule.style.traits.sees_full}
        rows = {}
        for name, rule in rules.items():
            inside = any(self._is_inside(name, region) for region in regions)
            context = StyleContext(
                sequence_parallel=inside and full.isdisjoint(_parents(name)),
                loss_parallel=self.plan.options.loss_parallel,
                fuse_loss=self.plan.options.fuse_loss,
                input_gathered=any(parent in gathered for parent in _parents(name)),
                sends_tokens=self.plan.options.expert_ranks > 1,
                etp=self.plan.options.etp,
                divides_adapters=self.layouts.divides_adapters(),
            )
            if context.sequence_parallel and not context.input_gathered:
                self._check_replicated_in_region(name, rule)
            try:
                rows[name] = ModuleRow(name, rule, contract_of(rule.style, self.model.modules[name], context))
            except ParallelizeError as error:
                self.problems += [replace(problem, where=rule.where) for problem in error.problems]
        return rows

    def _check_replicated_in_region(self, name: str, rule: Rule) -> None:
        """A replicated parameter on sequence shards has a partial gradient, which `replicate` would not sum."""
        partial = rule.style.options.get("gradient") == "partial"
        traits = rule.style.traits
        replicates = traits.replicates and not traits.by_token and not traits.sees_full
        if replicates and not partial and self.model.modules[name].shapes:
            what = f"{generic(name)} runs on sequence shards, so each rank has only a part of its gradient"
            fix = "use `sequence`, which sums the gradient under sequence parallelism"
            self.problems.append(Problem("replicated-in-region", what, rule.where, fix=fix))

    def _check_vocabulary(self, modules: dict[str, ModuleRow]) -> None:
        """Loss parallelism needs a head whose logits stay sharded."""
        if any(row.contract.leave is Conversion.VOCABULARY for row in modules.values()):
            return
        for choice in ("loss_parallel", "fuse_loss"):
            if getattr(self.plan.options, choice):
                fix = f"give the head `colwise(output=vocabulary)`, or turn {choice} off"
                what = f"{choice} is on, and no rule keeps logits sharded over the vocabulary"
                self.problems.append(Problem("no-vocabulary-output", what, self.plan.source, fix=fix))

    def _check_experts(self, modules: dict[str, ModuleRow]) -> None:
        """Experts over `ep` and `etp`: there are some, and enough for every rank."""
        ep, etp = self.plan.options.ep, self.plan.options.etp
        rows = [row for row in modules.values() if row.contract.computes_experts]
        if self.plan.options.expert_ranks > 1 and not rows:
            name, size = ("ep", ep) if ep > 1 else ("etp", etp)
            what, fix = f"{name} is {size}, and no rule is `experts`", f"{name}=1, or a plan with the style `experts`"
            self.problems.append(Problem("bad-ep", what, self.plan.source, fix=fix))
        counts = {row.fqn: self.model.modules[row.fqn].num_experts for row in rows}
        self.problems += wrong_orders(self.plan.options.expert_placement, counts) if rows else []
        for row in rows if ep > 1 else ():
            count = self.model.modules[row.fqn].num_experts
            if count < ep:
                what = f"{count} experts of {generic(row.fqn)} leave none for some of {ep} ranks"
                self.problems.append(Problem("bad-ep", what, row.rule.where, fix="a smaller ep"))
            elif etp > 1 and count % ep:
                what = f"{count} experts of {generic(row.fqn)}, each split over etp {etp}, are not divisible by ep {ep}"
                fix = "ep=" + ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                self.problems.append(Problem("bad-ep", what, row.rule.where, fix=fix))

    def _check_region(self, region: RegionRow, modules: dict[str, ModuleRow]) -> None:
        """The modules at the region's boundaries must have no conversion of their own there."""
        for name, side in ((region.enter, "enter"), (region.leave, "leave")):
            row = modules.get(name)
            if row is not None and getattr(row.contract, side) is not Conversion.NONE:
                side_name = {"enter": "input", "leave": "output"}[side]
                what = f"{generic(name)} converts its own {side_name}, where sequence parallelism begins or ends"
                fix = "give the style to a module inside it, or move the boundaries of `sequence_parallel`"
                self.problems.append(Problem("region-on-edge", what, row.rule.where, fix=fix))

    def _is_inside(self, name: str, region: RegionRow) -> bool:
        return layer_name(name) == region.leave or name.startswith(region.enter.rpartition(".")[0] + ".")

    # -- parameters -----------------------------------------------------------------------------------------------

    def _parameters(self, modules: dict[str, ModuleRow], rules: dict[str, Rule]) -> dict[str, ParameterRow]:
        rows: dict[str, ParameterRow] = {}
        unclaimed: list[ParameterFacts] = []
        for fact in self.model.parameters.values():
            claims = list(self._claims(fact, modules, rules))
            if not claims and self.plan.on_unclaimed == "leave":
                layout = replicated(fact.shape, self.tp_size)
                rows[fact.fqn] = ParameterRow(fact, Rule(fact.fqn, StyleText("replicate")), layout, False, plain=True)
                continue
            if not claims and self.plan.on_unclaimed == "replicate":
                self._check_replicable(fact, modules)
                claims = [(Rule(fact.fqn, StyleText("replicate")), Use())]
            if not claims:
                unclaimed.append(fact)
                continue
            candidates = [row for rule, use in claims if (row := self._row(fact, rule, use)) is not None]
            if candidates:
                rows[fact.fqn] = candidates[0]
                self._check_tie(candidates)
        if unclaimed:
            self._unclaimed(unclaimed)
        return rows

    def _claims(
        self, fact: ParameterFacts, modules: dict[str, ModuleRow], rules: dict[str, Rule]
    ) -> Iterator[tuple[Rule, Use]]:
        """Every rule for the parameter under any of its names; rules for several names of one parameter must agree."""
        for name in fact.names:
            owner, _, key = name.rpartition(".")
            for outer in _parents(owner):  # experts whose weights are in a module inside
                inner = modules.get(self.model.module_fqns[outer])
                use = inner.contract.uses.get(name.removeprefix(f"{outer}.")) if inner is not None else None
                if inner is not None and use is not None:
                    yield inner.rule, use
            row = modules.get(self.model.module_fqns[owner])
            if row is not None and row.contract.owns_parameters:
                if name in rules:
                    self._overlap(name, row.rule, rules[name])
                yield row.rule, row.contract.uses.get(key, Use())
            if name in rules:
                yield from self._claim_of_parameter(rules[name], owner, fact.shape)

    def _claim_of_parameter(self, rule: Rule, owner: str, shape: tuple[int, ...]) -> Iterator[tuple[Rule, Use]]:
        """The claim of a rule whose pattern is a parameter's name."""
        facts = replace(self.model.modules[self.model.module_fqns[owner]], shapes={"value": shape})
        if not rule.style.traits.for_parameters:
            what = f"`{rule.style.word}` is for modules, and {rule.pattern!r} names a parameter"
            self.problems.append(Problem("wrong-module-for-style", what, rule.where, fix="`shard` or `replicate`"))
            return
        yield rule, contract_of(rule.style, facts, StyleContext()).uses["value"]

    def _row(self, fact: ParameterFacts, rule: Rule, use: Use) -> ParameterRow | None:
        layout, problem = self.layouts.layout(fact, use, rule)
        if problem is not None:
            self.problems.append(problem)
            return None
        assert layout is not None
        return ParameterRow(fact, rule, layout, use.partial, axis=self.layouts.axis(use))

    def _check_tie(self, rows: list[ParameterRow]) -> None:
        first = rows[0]
        for other in rows[1:]:
            if other.layout != first.layout or other.partial != first.partial:
                names = short_list(first.fact.names)
                lines = ((first.rule.pattern, str(first.rule.style)), (other.rule.pattern, str(other.rule.style)))
                self.problems.append(
                    Problem(
                        "broken-tie",
                        f"{names} are one parameter, and its rules shard it differently",
                        other.rule.where,
                        lines,
                        "give both a style that shards the same dim, such as `embedding` and `colwise`",
                    )
                )
                return

    def _check_replicable(self, fact: ParameterFacts, modules: dict[str, ModuleRow]) -> None:
        """A parameter without a rule, between sharded siblings, most likely runs on sharded activations."""
        owner = fact.fqn.rpartition(".")[0]
        for parent in dict.fromkeys((owner, owner.rpartition(".")[0])):
            if not parent and not is_sequential(self.model.root):
                continue
            siblings = [row.contract for name, row in modules.items() if name and name.rpartition(".")[0] == parent]
            gathered = any(contract.leave is Conversion.GATHER_LAST for contract in siblings)
            splits = any(contract.traits.splits_output for contract in siblings)
            sums = any(contract.traits.sums_output for contract in siblings)
            if splits and sums and not gathered and self._may_run_between(owner, parent, modules):
                self.problems.append(
                    Problem(
                        "unclaimed-between-shards",
                        f"no rule claims {generic(fact.fqn)}, a sibling of sharded linears",
                        fix="write a plan with `replicate`, `replicate(gradient=partial)` or `shard` for it",
                    )
                )
                return

    def _may_run_between(self, owner: str, parent: str, modules: dict[str, ModuleRow]) -> bool:
        """Whether a module may run after a column linear among its siblings and before the row linear. An
        `nn.Sequential` has an order."""
        if not is_sequential(self.model.objects.get(parent)):
            return True
        between = False
        for name in self.model.objects[parent]._modules:
            child = f"{parent}.{name}".lstrip(".")
            if owner == child or owner.startswith(f"{child}."):
                break
            traits = modules[child].contract.traits if child in modules else Traits()
            between = traits.splits_output or (between and not traits.sums_output)
        return between

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
                "give each a style: `sequence` for norms between blocks, `replicate` for what is not sharded",
            )
        )


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
