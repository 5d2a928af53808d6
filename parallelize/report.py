"""What was done to a model, as a table a person can read: equal layers grouped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelize.layout import Layout
from parallelize.plan.pattern import generic
from parallelize.plan.resolve import ResolvedPlan
from parallelize.sharding import require_record
from parallelize.styles.contract import Edge


def describe_plan(module: nn.Module) -> str:
    """Two tables: every parameter with its style, shapes and how it lies over `tp`; and where a step communicates.

    Raises: ModelError `not-parallelized`.
    """
    record = require_record(module)
    resolved, rank = record.resolved, record.group.rank
    groups: dict[tuple, int] = {}
    full = local = 0
    for row in resolved.parameters.values():
        shape = row.layout.local_shape(rank)
        name = " = ".join(generic(name) for name in row.fact.names)
        key = (name, str(row.rule.style), _shape(row.layout.shape), _shape(shape), lies(row.layout, row.partial))
        groups[key] = groups.get(key, 0) + 1
        full += _numel(row.layout.shape)
        local += _numel(shape)
    head = ("parameter", "style", "full", "this rank", "over tp")
    rows = [(f"{key[0]} (x{count})" if count > 1 else key[0], *key[1:]) for key, count in groups.items()]
    plan = resolved.plan
    modes = [name for name in ("sequence_parallel", "loss_parallel", "fuse_loss") if getattr(plan, name)]
    title = f"plan {plan.name}: tp={record.group.size}" + "".join(f", {mode}" for mode in modes)
    share = f"{local:,} of {full:,} parameters on this rank ({100 * local / max(full, 1):.1f}%; 1/tp is {100 / record.group.size:.1f}%)"
    return "\n".join([title, *table(head, rows), share, *(_edges(resolved) if record.group.size > 1 else [])])


def _edges(resolved: ResolvedPlan) -> list[str]:
    """Where a step communicates: one line a kind of conversion, forward and backward."""
    found: dict[Edge, list[str]] = {}
    for row in resolved.modules.values():
        for edge in (row.contract.enter, row.contract.leave):
            if edge.forward or edge.backward:
                names = found.setdefault(edge, [])
                if generic(row.fqn) not in names:
                    names.append(generic(row.fqn))
    if resolved.region is not None:
        found[Edge.ENTER_REGION] = [f"input of {resolved.region.enter}"]
        found[Edge.LEAVE_REGION] = [f"output of {resolved.region.leave}"]
    rows: list[tuple[str, ...]] = [
        (edge.forward or "-", edge.backward or "-", ", ".join(names)) for edge, names in found.items()
    ]
    owed = sum(row.partial for row in resolved.parameters.values())
    if owed:
        rows.append(("-", "all_reduce", f"gradients of {owed} replicated parameters, together"))
    return ["", *table(("forward", "backward", "where"), rows)]


def lies(layout: Layout, partial: bool) -> str:
    """How a parameter lies over tp, in words."""
    if layout.dim is None:
        return "replicated, gradient summed" if partial else "replicated"
    words = f"dim {layout.dim}"
    pieces = max(len(owned) for owned in layout.owned)
    if pieces > 1:
        words += f", {pieces} chunks"
    if any(layout.shared(rank) for rank in range(layout.num_ranks)):
        words += ", some held by several ranks"
    return words


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table with columns as wide as they must be."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def overlap_report(module: nn.Module) -> str:
    """A table of the sites where collectives run beside products: what was asked, calls, overlapped calls, and why.

    Raises: ModelError `not-parallelized`.
    """
    sites = require_record(module).overlap.sites
    if not sites:
        return "no overlap: apply the plan with overlap=auto or chunked on more than one rank"
    groups: dict[tuple[str, ...], list[int]] = {}
    for site in sites:
        counts = groups.setdefault((generic(site.row.fqn), site.row.op, site.row.asked, site.why), [0, 0, 0])
        counts[:] = counts[0] + 1, counts[1] + site.calls, counts[2] + site.fused
    rows: list[tuple[str, ...]] = [
        (f"{key[0]} (x{found})" if found > 1 else key[0], key[1], key[2], f"{fused} of {calls}", key[3])
        for key, (found, calls, fused) in groups.items()
    ]
    return "\n".join(table(("where", "op", "asked", "overlapped", "last choice"), rows))


def overlap_counts(module: nn.Module, reset: bool = False) -> dict[str, tuple[int, int]]:
    """Of each site by module name: (forwards, those that ran overlapped) since the model was parallelized, or the last reset.

    Raises: ModelError `not-parallelized`.
    """
    counts = {}
    for site in require_record(module).overlap.sites:
        counts[site.row.fqn] = site.calls, site.fused
        if reset:
            site.calls = site.fused = 0
    return counts
