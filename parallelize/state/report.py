"""What was applied to a model, as tables of text in which equal layers are one row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.module_report import describe_module
from parallelize.state.records import (
    Cut,
    not_parallelized,
    part_of,
    pipeline_cut,
    record_of,
    require_record,
    resolution_of,
)
from parallelize.state.report_tables import row_text, shape_text, table


def describe_plan(module: AnyModel, name: str | None = None) -> str:
    """What was applied to a model, as text: parameters and communication over `tp`, and what was decided over other
    axes.

    The first table has the style, shapes and layout of every parameter of this rank; equal layers are one row. Nothing
    is sent.

    Args:
        module: a model that `parallelize_module`, `parallelize_model` or one of its steps returned.
        name: of one of its modules, such as `model.layers.0.self_attn`: what a call of that module runs, step by step,
            and its own parameters.

    Returns: lines of text.
    Raises: ModelError `not-parallelized`, `no-such-module`.
    """
    module = module_of(module)
    full = resolution_of(module)
    if full is None:
        raise not_parallelized(module)
    if name is not None:
        return describe_module(module, name)
    record = record_of(module)
    if record is None and full.plan.unlowered_styles:
        return "\n".join([*_unlowered_styles(full), *_other_axes(full, pipeline_cut(module))])
    resolved = record.resolved if record is not None else full.restricted(part_of(module, full.facts))
    tp_size = resolved.tp_size
    counts: dict[tuple[str, ...], int] = {}
    full_total = local_total = 0
    for row in resolved.parameters.values():
        rank = record.group_for(row).rank if record is not None else 0
        shape, local = row.layout.shape, row.layout.local_shape(rank)
        name = " = ".join(generic(name) for name in row.fact.names)
        cells = (name, "-" if row.plain else str(row.rule.style), shape_text(shape), shape_text(local), row_text(row))
        counts[cells] = counts.get(cells, 0) + 1
        full_total += math.prod(shape)
        local_total += math.prod(local)
    rows = [(f"{cells[0]} (x{count})" if count > 1 else cells[0], *cells[1:]) for cells, count in counts.items()]
    options = resolved.options
    modes = [name for name in ("sequence_parallel", "loss_parallel", "fuse_loss") if getattr(options, name)]
    percent = 100 * local_total / max(full_total, 1)
    return "\n".join(
        [
            f"plan {resolved.plan.name}: tp={tp_size}" + "".join(f", {mode}" for mode in modes),
            *table(("parameter", "style", "full", "this rank", "over tp"), rows),
            f"{local_total:,} of {full_total:,} parameters on this rank ({percent:.1f}%; 1/tp is {100 / tp_size:.1f}%)",
            *(_communication(resolved) if tp_size > 1 else []),
            *_unlowered_styles(full),
            *_other_axes(full, pipeline_cut(module)),
        ]
    )


def _unlowered_styles(full: ResolvedPlan) -> list[str]:
    """Which styles of a dict did not become rules, and why."""
    styles = full.plan.unlowered_styles
    lines = [f"  {item.fqn or 'the model'}: {type(item.style).__name__}: {item.reason}" for item in styles]
    return [f"{len(styles)} styles are applied as PyTorch does, because they have no rules:", *lines] if styles else []


def _other_axes(full: ResolvedPlan, cut: Cut | None) -> list[str]:
    """One line for each of the axes `pp`, `cp` and the data axes, and for recompute."""
    lines, options = [], full.options
    if cut is not None:
        count = len(full.stage_ranks)
        texts = [f"stage {stage} of {count}: {_span(cut.stages.units_of(stage))}" for stage in cut.local_stages]
        lines.append("pp: " + "; ".join(texts) + "".join(f"; tie {' = '.join(tie.members)}" for tie in full.ties))
    if full.attention:
        kinds = sorted({(generic(fqn), kind) for fqn, kind in full.attention.items()})
        lines.append("cp: " + ", ".join(f"{name} {kind}" for name, kind in kinds))
    if full.mesh.data_axes:
        units = f", units: {_names(full.zero_units)}" if full.zero_units else ""
        lines.append(f"gradients summed over {', '.join(full.mesh.data_axes)}; ZeRO {options.zero}{units}")
    if full.recompute_units:
        every = f", every {options.recompute_every}" if options.recompute_every > 1 else ""
        lines.append(f"recompute {options.recompute}{every}: {_names(full.recompute_units)}")
    return ["", *lines] if lines else []


def _span(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"


def _names(fqns: Sequence[str]) -> str:
    """Equal layers as one name, with their number."""
    counts = Counter(generic(fqn) for fqn in fqns)
    return ", ".join(f"{name} (x{count})" if count > 1 else name for name, count in counts.items())


def _communication(resolved: ResolvedPlan) -> list[str]:
    """The collectives of a step: one line for each kind of boundary conversion, with its forward and its backward."""
    names_of: dict[Conversion, list[str]] = {}
    for row in resolved.modules.values():
        for conversion in (row.contract.enter, row.contract.leave):
            if conversion.forward or conversion.backward:
                names = names_of.setdefault(conversion, [])
                if generic(row.fqn) not in names:
                    names.append(generic(row.fqn))
    for region in resolved.regions:
        names_of.setdefault(Conversion.ENTER_REGION, []).append(f"input of {region.enter}")
        names_of.setdefault(Conversion.LEAVE_REGION, []).append(f"output of {region.leave}")
    rows: list[tuple[str, ...]] = [
        (conversion.forward or "-", conversion.backward or "-", ", ".join(names))
        for conversion, names in names_of.items()
    ]
    pending = sum(row.partial for row in resolved.parameters.values())
    if pending:
        rows.append(("-", "all_reduce", f"gradients of {pending} replicated parameters, together"))
    return ["", *table(("forward", "backward", "where"), rows)]


def overlap_report(module: AnyModel) -> str:
    """A table of the call sites where collectives overlap with matmuls: the request, calls, overlapped calls, and
    reason; after it what `overlap_microbatches="auto"` has measured.

    Args:
        module: a model that `parallelize_module` returned.

    Returns: the table as text, of the calls on this rank; a sentence where nothing overlaps. No communication.
    Raises: ModelError `not-parallelized`.
    """
    module = module_of(module)
    overlap = require_record(module).overlap
    call_sites, last = overlap.call_sites, (overlap.microbatches,) if overlap.microbatches else ()
    if not call_sites:
        none = "no overlap of linears: apply the plan with overlap=auto or chunked on more than one rank"
        return "\n".join((none, *last))
    totals: dict[tuple[str, ...], list[int]] = {}
    for call_site in call_sites:
        planned = call_site.planned
        total = totals.setdefault((generic(planned.fqn), planned.op, planned.requested, call_site.reason), [0, 0, 0])
        total[:] = total[0] + 1, total[1] + call_site.calls, total[2] + call_site.overlapped
    rows: list[tuple[str, ...]] = [
        (f"{name} (x{count})" if count > 1 else name, op, requested, f"{overlapped} of {calls}", reason)
        for (name, op, requested, reason), (count, calls, overlapped) in totals.items()
    ]
    return "\n".join((*table(("where", "op", "asked", "overlapped", "last choice"), rows), *last))


def overlap_counts(module: AnyModel, reset: bool = False) -> dict[str, tuple[int, int]]:
    """Module name -> (forwards, those that overlapped), for every call site of `overlap_report`.

    Args:
        module: a model that `parallelize_module` returned.
        reset: start again at zero. Without it, counts go on from the previous reset, or from `parallelize_module`.

    Returns: numbers of forwards on this rank, by module name. No communication.
    Raises: ModelError `not-parallelized`.
    """
    module = module_of(module)
    counts = {}
    for call_site in require_record(module).overlap.call_sites:
        counts[call_site.planned.fqn] = call_site.calls, call_site.overlapped
        if reset:
            call_site.calls = call_site.overlapped = 0
    return counts
