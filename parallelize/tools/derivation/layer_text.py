"""One layer of each kind of a derived plan, as text and as a page of pictures: what each rank has, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from torch import nn

from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.pattern import generic
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.rows import ParameterRow
from parallelize.plan.schema import Plan
from parallelize.tools.analysis.show.layer_chart import LayerStep, draw_layer, layer_steps


def layer_text(model: nn.Module, plan: Plan, tp: int) -> str:
    """A table for each kind of layer: input, weight and output of its modules. In a weight, `/tp` marks the sharded dim."""
    resolved = _resolved(model, plan, tp, sequence_parallel=False)
    tables = []
    for layer in _layers(resolved):
        steps = list(layer_steps(resolved, layer))
        rows = [("module", "input", "weight", "output"), *(_row(step, layer) for step in steps)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        tables.append("\n".join([generic(layer), *(f"  {line}" for line in lines)]))
    return "\n\n".join(tables)


def layer_page(model: nn.Module, plan: Plan, tp: int) -> str:
    """A page with one picture for each kind of layer and mode that the plan serves."""
    body = [f"<h1>{escape(plan.name)}: what is sharded over tp={tp}</h1>"]
    for sequence in (False, True) if plan.regions else (False,):
        resolved = _resolved(model, plan, tp, sequence)
        for layer in _layers(resolved):
            title = f"{generic(layer)}{', sequence parallel' if sequence else ''}"
            body.append(f"<figure>{draw_layer(resolved, layer, title)}</figure>")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(plan.name)}</title>'
    return head + "<body>" + "\n".join(body) + "</body></html>\n"


def _resolved(model: nn.Module, plan: Plan, tp: int, sequence_parallel: bool) -> ResolvedPlan:
    return resolve(plan, describe(model), MeshSpec([("tp", tp)]), Options(sequence_parallel=sequence_parallel))


def _layers(resolved: ResolvedPlan) -> Iterator[str]:
    """The first layer of each kind: of lists of modules, those whose rules differ."""
    seen: set[tuple[str, ...]] = set()
    for fqn in resolved.modules:
        parts = fqn.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        if not numbers:
            continue
        layer = ".".join(parts[: numbers[-1] + 1])
        rules = tuple(
            f"{name.removeprefix(layer)} {row.rule.style}"
            for name, row in resolved.modules.items()
            if name.startswith(layer + ".")
        )
        kind = (generic(layer), *rules)
        if rules and kind not in seen:
            seen.add(kind)
            yield layer


def _row(step: LayerStep, layer: str) -> tuple[str, str, str, str]:
    return step.row.fqn.removeprefix(layer + "."), step.reads, _weight(step.weight), step.writes


def _weight(weight: ParameterRow | None) -> str:
    if weight is None:
        return ""
    sizes = [f"{size}/tp" if dim == weight.layout.dim else str(size) for dim, size in enumerate(weight.fact.shape)]
    return f"[{', '.join(sizes)}]"
