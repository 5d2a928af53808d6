"""Plans that fit a model's names and shapes, and would still compute something else: found before they run.

Each check is a fact about shards: what is gathered must lie in order, what is contracted must be held once, a column
split must meet a row split of the same width, a whole parameter among shards must say whose gradient it has.

Floor 2: torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelize.errors import Problem
from parallelize.plan.pattern import generic
from parallelize.styles.contract import Edge

if TYPE_CHECKING:
    from parallelize.plan.model import ModelFacts
    from parallelize.plan.resolve import ModuleRow, ParameterRow
    from parallelize.plan.schema import Plan

ORDERED = {
    Edge.GATHER_LAST: "gathered",
    Edge.VOCABULARY: "read as a vocabulary",
    Edge.SPLIT_LAST: "cut from whole input",
}


def check_soundness(
    plan: Plan, model: ModelFacts, modules: dict[str, ModuleRow], parameters: dict[str, ParameterRow]
) -> Iterator[Problem]:
    """Every way in which the resolved rows would give other numbers than the unsharded model."""
    yield from _unused_sizes(plan, model, modules)
    yield from _unplanned_owners(model, modules, parameters)
    gathered = [name for name, row in modules.items() if row.contract.style == "gather"]
    for name, row in modules.items():
        yield from _ordered(name, row, model, parameters)
        yield from _held_once(name, row, model, parameters)
        yield from _named_parameters(name, row, model)
        inside = any(name.startswith(above + ".") for above in gathered)
        yield from _whole_among_shards(name, row, model, modules, inside)
        yield from _meets(name, row, model, modules)
        yield from _counts_left_whole(name, row, plan, model)


def _siblings(name: str, modules: dict[str, ModuleRow], style: str) -> list[ModuleRow]:
    parent = name.rpartition(".")[0]
    return [row for other, row in modules.items() if row.contract.style == style and other.rpartition(".")[0] == parent]


def _weight(name: str, model: ModelFacts, parameters: dict[str, ParameterRow]) -> ParameterRow | None:
    return parameters.get(model.owners.get(f"{name}.weight", ""))


def _unused_sizes(plan: Plan, model: ModelFacts, modules: dict[str, ModuleRow]) -> Iterator[Problem]:
    """A size that is declared and splits nothing: the rule that should name it most likely stands beside others that do."""
    used = {unit for rule in plan.rules for unit in rule.style.unit}
    for name, size in plan.sizes.items():
        if name not in used:
            what = f"no rule splits by the size {name}, so nothing becomes local with it"
            fix = f"name it where it is split: `colwise({name})`, or remove it"
            blocks = {fqn.rpartition(".")[0] for fqn, row in modules.items() if row.rule.style.unit}
            beside = {
                f"{row.rule.pattern}: {row.rule.style}"
                for fqn, row in modules.items()
                if fqn.rpartition(".")[0] in blocks
                and model.modules[fqn].kind in ("linear", "conv1d")
                and row.contract.compute != "rowwise"
            }
            rows = (("beside split heads", "; ".join(sorted(beside))),) if beside else ()
            yield Problem("unused-size", what, size.where or plan.source, rows, fix)


def _unplanned_owners(
    model: ModelFacts, modules: dict[str, ModuleRow], parameters: dict[str, ParameterRow]
) -> Iterator[Problem]:
    """A tied weight is split by one owner's rule; the other's forward must know of it too."""
    for row in parameters.values():
        if row.layout.dim is None or len(row.fact.names) < 2:
            continue
        for name in row.fact.names:
            owner = model.aliases[name.rpartition(".")[0]]
            facts = model.modules[owner]
            if owner not in modules and facts.kind in ("embedding", "linear", "conv1d"):
                what = f"{generic(owner)} shares {generic(row.fqn)}, which is split, and has no rule of its own"
                fix = (
                    f"give {generic(owner)} a style that splits the same dim: `embedding`, `colwise(output=vocabulary)`"
                )
                yield Problem("unplanned-tie", what, row.rule.where, (("module", generic(owner)),), fix)


def _ordered(name: str, row: ModuleRow, model: ModelFacts, parameters: dict[str, ParameterRow]) -> Iterator[Problem]:
    weight = _weight(name, model, parameters)
    for edge in (row.contract.enter, row.contract.leave):
        if edge in ORDERED and weight is not None and not weight.layout.is_canonical:
            what = f"{generic(name)} is packed or shared, so its shards side by side are not the whole, and it is {ORDERED[edge]}"
            fix = "leave its output a shard, or use `replicate` for it"
            yield Problem("packed-edge", what, row.rule.where, fix=fix)


def _held_once(name: str, row: ModuleRow, model: ModelFacts, parameters: dict[str, ParameterRow]) -> Iterator[Problem]:
    weight = _weight(name, model, parameters)
    if row.contract.compute == "rowwise" and weight is not None and weight.layout.shared(0):
        what = f"{generic(name)} contracts over units that several ranks hold, so the sum counts them more than once"
        yield Problem("shared-contraction", what, row.rule.where, fix="split it by a size that tp divides")


def _named_parameters(name: str, row: ModuleRow, model: ModelFacts) -> Iterator[Problem]:
    facts = model.modules[name]
    if row.contract.style == "shard" and facts.kind in ("norm", "embedding", "linear", "conv1d"):
        what = (
            f"`shard` on {generic(name)}, a {facts.class_name}: its forward would run on a part as if it were the whole"
        )
        fix = "use the style for its kind: colwise, rowwise, embedding, rms_norm; `shard` is for bare parameters"
        yield Problem("shard-on-module", what, row.rule.where, fix=fix)


def _whole_among_shards(
    name: str, row: ModuleRow, model: ModelFacts, modules: dict[str, ModuleRow], inside: bool
) -> Iterator[Problem]:
    """A whole parameter beside split projections: nothing but the plan's writer knows what its gradient is."""
    style, facts = row.rule.style, model.modules[name]
    if row.contract.style not in ("replicate", "sequence") or not facts.shapes:
        return
    beside = bool(_siblings(name, modules, "colwise") and _siblings(name, modules, "rowwise"))
    gradient = style.options.get("gradient")
    if inside and beside and facts.kind == "norm" and gradient is None:
        what = f"{generic(name)} stands among split projections: does it see this rank's heads, or everything?"
        fix = "`replicate(gradient=partial)` for heads, `replicate(gradient=full)` for everything"
        yield Problem("unclear-gradient", what, row.rule.where, fix=fix)
    if gradient == "partial" and not inside and not beside:
        what = (
            f"{generic(name)} works on whole activations, so its gradient is whole: summing it gives tp times too much"
        )
        fix = "`sequence` for a norm that sequence parallelism shards, `replicate` otherwise"
        yield Problem("partial-without-shards", what, row.rule.where, fix=fix)


def _meets(name: str, row: ModuleRow, model: ModelFacts, modules: dict[str, ModuleRow]) -> Iterator[Problem]:
    """A column split beside a row split of the same block: same units, same width."""
    rows = _siblings(name, modules, "rowwise")
    if row.contract.style != "colwise" or row.contract.leave is not Edge.NONE or not rows:
        return
    style = row.rule.style
    units = {other.rule.style.unit for other in rows}
    where = f"{generic(name)} and {generic(rows[0].fqn)}"
    if (not style.unit and () not in units) or (len(style.unit) > 1 and (style.unit[0],) not in units):
        what = f"{where} are split by different units: {style} and {rows[0].rule.style}"
        yield Problem("units-do-not-meet", what, row.rule.where, fix="split what is multiplied by the same size")
    elif not style.unit:
        columns = {
            _dim_size(other, model, 0) // other.rule.style.chunks for other in _siblings(name, modules, "colwise")
        }
        widths = [_dim_size(other, model, 1) for other in rows if not other.rule.style.unit]
        if not columns & set(widths) and all(not other.rule.style.options for other in rows):
            what = f"{where} do not meet: {style} gives {sorted(columns)} columns to rows of {widths}"
            yield Problem(
                "widths-do-not-meet", what, row.rule.where, fix="check `chunks`, and which module feeds which"
            )


def _dim_size(row: ModuleRow, model: ModelFacts, dim: int) -> int:
    """Output (0) or input (1) features of a linear."""
    facts = model.modules[row.fqn]
    return facts.shapes["weight"][1 - dim if facts.kind == "conv1d" else dim]


def _counts_left_whole(name: str, row: ModuleRow, plan: Plan, model: ModelFacts) -> Iterator[Problem]:
    """The module around a split projection keeps the count that splits it: its forward most likely reads it."""
    parent = name.rpartition(".")[0]
    holder = model.objects.get(model.aliases.get(parent, parent))
    local = {item.attribute for item in plan.local}
    for unit in row.rule.style.unit if row.contract.style == "colwise" else ():
        source = plan.sizes[unit].source
        if isinstance(source, str) and source not in local and type(vars(holder).get(source)) is int and parent:
            what = f"{generic(parent)}.{source} counts the {unit} that {generic(name)} splits, and stays whole"
            where = row.rule.where
            yield Problem("count-left-whole", what, where, fix=f"local: {{{generic(parent)}: {{{source}: {unit}}}}}")
