"""Which factors a plan shards: what it shards of each parameter, compared with what the forward makes of that dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.plan.dims.classes import Classes
from parallelize.plan.dims.factors import Factor, leaves, size_of
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ParameterRow, ResolvedPlan

Parts = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Shard:
    """What the plan shards of one parameter. `factors`: the leading one of each part that the forward makes of the dim."""

    row: ParameterRow
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class PlanConflict:
    """A shard that does not follow the forward: where, with which slug, and what is wrong."""

    name: str
    slug: str
    what: str
    row: ParameterRow


def computes_otherwise(resolved: ResolvedPlan, module: str) -> bool:
    """Whether an operation of this module is part of what a style computes in a way of its own: tables, experts, PyTorch's attention."""
    parts = module.split(".")
    rows = (resolved.modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    contracts = (row.contract for row in rows if row is not None)
    return any(c.traits.looks_up or c.sends_tokens or not c.runs_stock_forward for c in contracts)


def computed_parameters(classes: Classes, resolved: ResolvedPlan) -> Iterator[tuple[str, ParameterRow]]:
    """Parameters that the forward computed with, under each name by which a module reads them, where no style does so in a way of its own.

    A forward says nothing about the modules that it leaves out: an optional branch, a layer that is skipped at random.
    """
    record = classes.record
    for row in resolved.parameters.values():
        for name in row.fact.names:
            is_computed = record.first_names.get(name) in record.computed_with
            if is_computed and not computes_otherwise(resolved, name.rpartition(".")[0]):
                yield name, row


def planned_shards(classes: Classes, resolved: ResolvedPlan) -> tuple[dict[str, Shard], list[PlanConflict]]:
    """(the shards by parameter, those that do not follow the parts of a dim or that cut one of its units)."""
    shards: dict[str, Shard] = {}
    misfits: list[PlanConflict] = []
    for name, row in computed_parameters(classes, resolved):
        dim = row.layout.dim
        if dim is None or row.axis != "tp" or _is_full(row):
            continue
        factors = classes.record.parameters[name][dim]
        divisions = _divisions(classes, factors)
        chunks = next(filter(None, (_chunks(parts, row) for parts in divisions)), None)
        cut = "" if chunks is None else _cut_unit(classes, chunks, row)
        if chunks is None:
            misfits.append(
                PlanConflict(
                    name, "divided-features", _of_parts(divisions[0], row, _place_of_split(classes, factors)), row
                )
            )
        elif cut:
            misfits.append(PlanConflict(name, "divided-units", cut, row))
        else:
            shards[name] = Shard(row, tuple(chunk[0] for chunk in _divided(chunks, row) if chunk))
    return shards, misfits


def _divisions(classes: Classes, dim: list[Factor]) -> list[Parts]:
    """The ways to see a dim as parts: its factors; and where the forward splits one of them, the parts of that within each of the
    factors before it."""
    flat = tuple(leaves(dim))
    divisions = [classes.outer_parts_of(dim), classes.parts_of(dim)]
    for index, factor in enumerate(flat if len(flat) > 1 else ()):
        if factor in classes.parts:
            parts, after = classes.parts_of([factor]), flat[index + 1 :]
            divisions.append(tuple((*part, *after) for _ in range(size_of(flat[:index])) for part in parts))
    return divisions


def _chunks(parts: Parts, row: ParameterRow) -> list[tuple[Factor, ...]] | None:
    """The chunks of a dim that the plan shards each by itself, as factors; None where they are not those of the forward."""
    count = max(1, len(row.layout.chunks))
    if len(parts) > 1:
        sizes = [size_of(part) for part in parts]
        chunks = [chunk.size for chunk in row.layout.chunks]
        return list(parts) if chunks == sizes else None
    (part,) = parts
    for index in range(len(part)):
        if size_of(part[:index]) == count:
            return [part[index:]] * count
    return None


def _cut_unit(classes: Classes, chunks: list[tuple[Factor, ...]], row: ParameterRow) -> str:
    """Whether a range begins or ends inside of what the leading factor counts, such as a head."""
    dim, start = row.layout.dim, 0
    assert dim is not None
    for chunk in chunks:
        repeated = 1 + next((i for i, factor in enumerate(chunk[1:]) if factor not in classes.repeats), len(chunk) - 1)
        width, stop = size_of(chunk[repeated:]), start + size_of(chunk)
        for owned in row.layout.owned:
            for low, high in owned:
                if start <= low and high <= stop and ((low - start) % width or (high - start) % width):
                    return (
                        f"a rank has {low} to {high} of {row.layout.shape[dim]}, and units of {width} must not be split"
                    )
        start = stop
    return ""


def _is_full(row: ParameterRow) -> bool:
    """Whether each rank stores all of it, as the only key/value head."""
    assert row.layout.dim is not None
    return all(row.layout.local_size(rank) == row.layout.shape[row.layout.dim] for rank in range(row.layout.num_ranks))


def _divided(chunks: list[tuple[Factor, ...]], row: ParameterRow) -> Iterator[tuple[Factor, ...]]:
    """The chunks of which ranks have different parts: the only key/value head is full on each."""
    start = 0
    for chunk in chunks:
        stop = start + size_of(chunk)
        if not all(any(low <= start and stop <= high for low, high in owned) for owned in row.layout.owned):
            yield chunk
        start = stop


def _place_of_split(classes: Classes, dim: list[Factor]) -> str:
    """The line of the model's code that splits a dim; empty where it is not known."""
    factors = set(leaves(dim))
    cut = next((cut for cut in classes.record.slices if cut.line and factors & set(leaves(cut.dim))), None)
    return f" in {generic(cut.module) or 'the model'} ({cut.line})" if cut is not None else ""


def _of_parts(parts: Parts, row: ParameterRow, place: str) -> str:
    """place: where the forward splits it."""
    planned = [chunk.size for chunk in row.layout.chunks] or [row.layout.shape[row.layout.dim or 0]]
    if len(parts) > 1:
        actual = [size_of(part) for part in parts]
        return f"the forward splits it into parts of {actual}{place}, and the plan shards chunks of {planned}"
    return f"the plan shards chunks of {planned}, and the forward reads it as {[factor.size for factor in parts[0]]}"
