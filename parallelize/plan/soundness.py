"""Finds plans that fit a model's names and shapes, and would compute something else than the unsharded model.

Each check is a fact about shards: shards that are gathered must be in order, a contracted dim must be stored once, a
column split must match the row split of its block, a replicated parameter among sharded ones must declare its gradient.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parallelize.base.errors import Problem
from parallelize.plan.adapters import layer_name
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ModuleRow, ParameterRow
from parallelize.plan.schema import Plan
from parallelize.plan.styles.contract import Conversion
from parallelize.plan.styles.style import REST, ModuleFacts

# conversions for which shards, one after another, must be the full tensor -> what they do with it
ORDERED = {
    Conversion.GATHER_LAST: "gathers them",
    Conversion.VOCABULARY: "reads them as a vocabulary",
    Conversion.SPLIT_LAST: "splits a full input to match them",
}


def check_soundness(
    plan: Plan, model: ModelFacts, modules: dict[str, ModuleRow], parameters: dict[str, ParameterRow]
) -> Iterator[Problem]:
    """All problems for which the resolved rows would compute other numbers than the unsharded model."""
    yield from _unused_sizes(plan, model, modules)
    yield from _unplanned_parents(model, modules, parameters)
    gathered = {name for name, row in modules.items() if row.contract.traits.shares_input}
    relatives = _Relatives(modules)
    for name, row in modules.items():
        yield from _ordered(name, row, model, parameters)
        yield from _stored_once(name, row, model, parameters)
        yield from _shard_on_module(name, row, model)
        inside = not gathered.isdisjoint(_ancestors(name))
        yield from _replicated_among_shards(name, row, model, relatives, inside)
        yield from _matching_splits(name, row, model, relatives)
        yield from _counts_not_local(name, row, plan, model)
        yield from _inside_experts(name, row, parameters)
    yield from _gathers_without_shards(modules, parameters)


class _Relatives:
    """The rows of modules by the names of their parent and grandparent, looked up for each module: the checks stay
    linear."""

    def __init__(self, modules: dict[str, ModuleRow]):
        self.children: dict[str, list[ModuleRow]] = defaultdict(list)
        self.grandchildren: dict[str, list[ModuleRow]] = defaultdict(list)
        for name, row in modules.items():
            parent = layer_name(name).rpartition(".")[0]
            self.children[parent].append(row)
            if parent:
                self.grandchildren[parent.rpartition(".")[0]].append(row)

    def siblings(self, name: str, trait: str) -> list[ModuleRow]:
        """Rows of modules with the same parent whose style has this trait."""
        rows = self.children.get(layer_name(name).rpartition(".")[0], ())
        return [row for row in rows if getattr(row.contract.traits, trait)]

    def holds_sharded_projections(self, name: str) -> bool:
        """Whether a module has column and row linears, beside which its own parameters see a part of the data."""
        traits = [row.contract.traits for row in self.children.get(layer_name(name), ())]
        return any(trait.splits_output for trait in traits) and any(trait.sums_output for trait in traits)

    def has_row_linear_around(self, name: str) -> bool:
        """Whether a row linear stands beside the block of a module: it reads the shards that the block returns."""
        parent = layer_name(name).rpartition(".")[0]
        return bool(parent and self.siblings(parent, "sums_output"))

    def has_row_linear_in_a_list(self, name: str) -> bool:
        """Whether a list beside a module, such as `to_out`, has a row linear."""
        rows = self.grandchildren.get(layer_name(name).rpartition(".")[0], ())
        return any(row.contract.traits.sums_output and layer_name(row.fqn).rpartition(".")[2].isdigit() for row in rows)


def _ancestors(name: str) -> Iterator[str]:
    """The names of the modules that contain a module, the root left out."""
    while name := name.rpartition(".")[0]:
        yield name


def _weight(name: str, model: ModelFacts, parameters: dict[str, ParameterRow]) -> ParameterRow | None:
    return parameters.get(model.parameter_fqns.get(f"{name}.{model.modules[name].weight_key}", ""))


def _unused_sizes(plan: Plan, model: ModelFacts, modules: dict[str, ModuleRow]) -> Iterator[Problem]:
    """A declared size that no rule uses; the rule that should name it is most likely a sibling of those that name
    sizes."""
    used = {name for rule in plan.rules for name in rule.style.sizes}
    used |= {width for item in plan.local for _, width in item.terms} | {item.size for item in plan.local_inputs}
    for name, size in plan.sizes.items():
        if name not in used:
            what = f"no rule shards by the size {name}, so nothing becomes local with it"
            fix = f"name it in the rule that shards it: `colwise({name})`, or remove it"
            blocks = {fqn.rpartition(".")[0] for fqn, row in modules.items() if row.rule.style.unit}
            siblings = {
                f"{row.rule.pattern}: {row.rule.style}"
                for fqn, row in modules.items()
                if fqn.rpartition(".")[0] in blocks
                and model.modules[fqn].kind in ("linear", "conv1d")
                and not row.contract.traits.sums_output
            }
            rows = (("siblings of sharded heads", "; ".join(sorted(siblings))),) if siblings else ()
            yield Problem("unused-size", what, size.where or plan.source, rows, fix)


def _unplanned_parents(
    model: ModelFacts, modules: dict[str, ModuleRow], parameters: dict[str, ParameterRow]
) -> Iterator[Problem]:
    """A tied weight is sharded by the rule of one owner; the other owner needs a rule as well."""
    for row in parameters.values():
        if row.layout.dim is None or len(row.fact.names) < 2:
            continue
        for name in row.fact.names:
            owner = model.module_fqns[name.rpartition(".")[0]]
            facts = model.modules[owner]
            if owner not in modules and facts.kind in ("embedding", "linear", "conv1d"):
                what = f"{generic(owner)} uses {generic(row.fqn)}, which is sharded, and has no rule of its own"
                fix = (
                    f"give {generic(owner)} a style that shards the same dim: `embedding`, `colwise(output=vocabulary)`"
                )
                yield Problem("unplanned-tie", what, row.rule.where, (("module", generic(owner)),), fix)


def _ordered(name: str, row: ModuleRow, model: ModelFacts, parameters: dict[str, ParameterRow]) -> Iterator[Problem]:
    weight = _weight(name, model, parameters)
    for conversion in (row.contract.enter, row.contract.leave):
        if conversion in ORDERED and weight is not None and not weight.layout.is_canonical:
            what = (
                f"{generic(name)} is packed or replicated in part, so its shards in order are not the full weight, "
                f"and its style {ORDERED[conversion]}"
            )
            fix = "keep its output sharded, or use `replicate` for it"
            yield Problem("packed-edge", what, row.rule.where, fix=fix)


def _gathers_without_shards(modules: dict[str, ModuleRow], parameters: dict[str, ParameterRow]) -> Iterator[Problem]:
    """A gradient that is summed over ranks at the input of a block, in which each rank computes all of it."""
    sharded = {name for name, row in modules.items() if _has_shards(row)}
    sharded |= {row.fqn for row in parameters.values() if row.partial or row.layout.dim is not None}
    containers = {container for name in sharded for container in _ancestors(name)}
    for name, row in modules.items():
        if row.contract.traits.shares_input and name not in containers and not row.contract.traits.sees_full:
            what = (
                f"nothing inside of {generic(name)} is sharded, so that the gradient of its input, summed over tp, is "
                "tp times too large"
            )
            yield Problem("gather-without-shards", what, row.rule.where, fix="remove the rule, or shard what is inside")


def _has_shards(row: ModuleRow) -> bool:
    contract = row.contract
    is_sharded = any(use.dim is not None for use in contract.uses.values())
    return is_sharded or contract.traits.splits_output or contract.traits.sums_output or contract.computes_experts


def _stored_once(
    name: str, row: ModuleRow, model: ModelFacts, parameters: dict[str, ParameterRow]
) -> Iterator[Problem]:
    weight = _weight(name, model, parameters)
    if row.contract.traits.sums_output and weight is not None and weight.layout.shared(0):
        what = f"{generic(name)} contracts over units that several ranks store, so the sum counts them more than once"
        yield Problem("shared-contraction", what, row.rule.where, fix="shard it by a size that tp divides")


_WITH_STYLES = ("norm", "embedding", "linear", "conv1d", "convolution", "channel_norm")
"""Kinds of modules that have styles of their own."""


def _shard_on_module(name: str, row: ModuleRow, model: ModelFacts) -> Iterator[Problem]:
    facts = model.modules[name]
    if row.contract.style == "shard" and facts.kind in _WITH_STYLES:
        what = (
            f"`shard` on {generic(name)}, a {facts.class_name}: its forward would use a shard as if it were the full "
            "weight"
        )
        fix = (
            "use the style of its kind: colwise, rowwise, embedding, rms_norm, channel_norm; `shard` is for bare "
            "parameters"
        )
        yield Problem("shard-on-module", what, row.rule.where, fix=fix)


def _replicated_among_shards(
    name: str, row: ModuleRow, model: ModelFacts, relatives: _Relatives, inside: bool
) -> Iterator[Problem]:
    """A replicated parameter among sharded projections: only the author of the plan knows what its gradient is."""
    style, facts = row.rule.style, model.modules[name]
    if not row.contract.traits.replicates or not facts.shapes:
        return
    sharded_siblings = bool(relatives.siblings(name, "splits_output") and relatives.siblings(name, "sums_output"))
    gradient = style.options.get("gradient")
    if sharded_siblings and gradient is None and (inside or _may_be_an_activation(facts)):
        what = (
            f"{generic(name)} is a sibling of sharded projections: does it run on local features, or on full "
            "activations?"
        )
        fix = (
            "`replicate(gradient=partial)` for local heads or features, `replicate(gradient=full)` for full activations"
        )
        yield Problem("unclear-gradient", what, row.rule.where, fix=fix)
    is_among_shards = sharded_siblings or (
        relatives.siblings(name, "splits_output")
        and (relatives.has_row_linear_in_a_list(name) or relatives.has_row_linear_around(name))
    )
    is_among_shards = is_among_shards or relatives.holds_sharded_projections(name)
    if gradient == "partial" and not inside and not is_among_shards:
        what = (
            f"{generic(name)} runs on full activations, so its gradient is full, and its sum over tp is tp times too "
            "large"
        )
        fix = "`sequence` for a norm that sequence parallelism shards, `replicate` otherwise"
        yield Problem("partial-without-shards", what, row.rule.where, fix=fix)


def _may_be_an_activation(facts: ModuleFacts) -> bool:
    """Whether a module fits any width, as PReLU does: no linear, no table, no norm of more than one feature."""
    return facts.kind == "other" or (facts.kind == "norm" and facts.shapes["weight"] == (1,))


def _inside_experts(name: str, row: ModuleRow, parameters: dict[str, ParameterRow]) -> Iterator[Problem]:
    """A parameter of a module inside of experts, such as a norm of their outputs: each rank has a part of its
    gradient."""
    is_known = any("." in key for key in row.contract.uses)  # that it computes with these modules inside
    for fqn, parameter in parameters.items() if row.contract.computes_experts and not is_known else ():
        owner = fqn.rpartition(".")[0]
        if owner.startswith(f"{name}.") and parameter.fact.requires_grad:
            what = f"{generic(owner)} has parameters, of whose gradient each rank of divided experts has another part"
            yield Problem(
                "experts-not-divisible", what, row.rule.where, fix=f"`replicate` for {generic(name)}, and ep=1"
            )


def _matching_splits(name: str, row: ModuleRow, model: ModelFacts, relatives: _Relatives) -> Iterator[Problem]:
    """The column split and the row split of a block must have the same units and the same width."""
    rows = relatives.siblings(name, "sums_output")
    if not row.contract.traits.splits_output or row.contract.leave is not Conversion.NONE or not rows:
        return
    style = row.rule.style
    units = {other.rule.style.unit for other in rows}
    units |= {(unit,) if unit != REST else () for other in rows for unit in other.rule.style.unit}  # each of its chunks
    where = f"{generic(name)} and {generic(rows[0].fqn)}"
    if (not style.unit and () not in units) or (len(style.unit) > 1 and not {(unit,) for unit in style.unit} & units):
        what = f"{where} are sharded by different units: {style} and {rows[0].rule.style}"
        fix = "shard both factors of a matmul by the same size"
        yield Problem("units-do-not-meet", what, row.rule.where, fix=fix)
    elif not style.unit:
        splitting = relatives.siblings(name, "splits_output")
        kinds = [model.modules[other.fqn] for other in (*splitting, *rows)]
        if any(facts.weight_key not in facts.shapes for facts in kinds):
            return  # not linears: only the author of their style knows their widths
        columns = {_dim_size(other, model, 0) // other.rule.style.chunks for other in splitting}
        widths = [_dim_size(other, model, 1) for other in rows if not other.rule.style.unit]
        if not columns & set(widths) and all(not other.rule.style.options for other in rows):
            what = f"{where} do not match: {style} gives {sorted(columns)} columns, and the rows take {widths}"
            fix = "check `chunks`, and which module is the input of which"
            yield Problem("widths-do-not-meet", what, row.rule.where, fix=fix)


def _dim_size(row: ModuleRow, model: ModelFacts, dim: int) -> int:
    """Output (0) or input (1) features of a linear."""
    facts = model.modules[row.fqn]
    return facts.weight_shape[1 - dim if facts.kind == "conv1d" else dim]


def _counts_not_local(name: str, row: ModuleRow, plan: Plan, model: ModelFacts) -> Iterator[Problem]:
    """The parent of a sharded projection stores the full count, which its forward most likely reads."""
    parent = layer_name(name).rpartition(".")[0]
    parent_module = model.objects.get(model.module_fqns.get(parent, parent))
    local = {item.attribute for item in plan.local}
    units = [unit for unit in row.rule.style.unit if unit in plan.sizes]
    for unit in units if row.contract.traits.splits_output else ():
        source = plan.sizes[unit].source
        if isinstance(source, str) and source not in local and type(vars(parent_module).get(source)) is int and parent:
            what = (
                f"{generic(parent)}.{source} counts the {unit} that {generic(name)} shards, and no `local:` makes it "
                "local"
            )
            where = row.rule.where
            yield Problem("count-left-whole", what, where, fix=f"local: {{{generic(parent)}: {{{source}: {unit}}}}}")
