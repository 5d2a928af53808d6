"""Checks a plan that somebody wrote against one recorded forward: what it shards must be shardable, and sharded alike everywhere.

The first forward on real ranks watches operations by name; here the dims of the plan are followed through the whole forward, before
anything runs on a mesh: an operation that needs all of a dim that the plan shards is named, with the module and the line of its code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.dims.classes import Blocked, Classes
from parallelize.dims.factors import Factor, size_of
from parallelize.errors import Problem
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.rows import ParameterRow
from parallelize.styles.contract import Conversion

_GATHERED = (Conversion.GATHER_LAST, Conversion.VOCABULARY)
_FULL = ("an output of the model", "an input of the model")


@dataclass(frozen=True)
class Shard:
    """What the plan shards of one parameter. `factors`: the leading one of each part that the forward makes of the dim."""

    row: ParameterRow
    factors: tuple[Factor, ...]


class PlanCheck:
    """Compares a resolved plan with what a forward allows.

    Args:
        classes: of a forward of the same model. resolved: the plan over `tp`, without sequence parallelism.
    """

    def __init__(self, classes: Classes, resolved: ResolvedPlan):
        self.classes, self.resolved = classes, resolved

    def problems(self) -> list[Problem]:
        """All mistakes, each once for all layers that have it."""
        self.shards: dict[str, Shard] = {}
        problems = [
            *self._splits(),
            *self._mixed(),
            *self._left_full(),
            *self._entries(),
            *self._gradients(),
        ]
        return list({(problem.slug, problem.what): problem for problem in problems}.values())

    # -- which factors are sharded -----------------------------------------------------------------------------------------

    def _splits(self) -> Iterator[Problem]:
        """Shards that do not follow the parts of a dim, or that cut one of its units."""
        for name, row in self._computed():
            dim = row.layout.dim
            if dim is None or row.axis != "tp" or _is_full(row):
                continue
            parts = self.classes.parts_of(self.classes.record.parameters[name][dim])
            chunks = self._chunks(parts, row)
            if chunks is None:
                yield self._problem("divided-features", name, self._of_parts(name, parts, row), row)
                continue
            cut = self._cut_unit(chunks, row)
            if cut:
                yield self._problem("divided-units", name, cut, row)
                continue
            self.shards[name] = Shard(row, tuple(chunk[0] for chunk in _divided(chunks, row)))

    def _computed(self) -> Iterator[tuple[str, ParameterRow]]:
        """Parameters under each name by which a module reads them, where no style computes with them in a way of its own."""
        for row in self.resolved.parameters.values():
            for name in row.fact.names:
                if name in self.classes.record.parameters and not self._has_own_compute(name):
                    yield name, row

    def _has_own_compute(self, name: str) -> bool:
        """Whether a style computes this parameter's module in a way of its own: tables, experts, attention of PyTorch."""
        return self._is_inside_of_such(name.rpartition(".")[0])

    def _computes_otherwise(self, module: str) -> bool:
        row = self.resolved.modules.get(module)
        if row is None:
            return False
        contract = row.contract
        return contract.traits.looks_up or contract.sends_tokens or not contract.runs_stock_forward

    def _is_inside_of_such(self, module: str) -> bool:
        """Whether an operation of this module is part of what a style computes in a way of its own."""
        parts = module.split(".")
        return any(self._computes_otherwise(".".join(parts[:end])) for end in range(1, len(parts) + 1))

    def _chunks(self, parts: tuple[tuple[Factor, ...], ...], row: ParameterRow) -> list[tuple[Factor, ...]] | None:
        """The chunks of a dim that the plan shards each by itself, as factors; None where they are not those of the forward."""
        count = max(1, len(row.layout.chunks))
        if len(parts) > 1:
            sizes = [size_of(part) for part in parts]
            chunks = [chunk.size for chunk in row.layout.chunks]
            return list(parts) if chunks == sizes and all(parts) else None
        (part,) = parts
        for index in range(len(part)):
            if size_of(part[:index]) == count:
                return [part[index:]] * count
        return None

    def _cut_unit(self, chunks: list[tuple[Factor, ...]], row: ParameterRow) -> str:
        """Whether a range begins or ends inside of what the leading factor counts, such as a head."""
        dim, start = row.layout.dim, 0
        assert dim is not None
        for chunk in chunks:
            repeated = 1 + next(
                (i for i, factor in enumerate(chunk[1:]) if factor not in self.classes.repeats), len(chunk) - 1
            )
            width = size_of(chunk[repeated:])
            for owned in row.layout.owned:
                for low, high in owned:
                    inside = start <= low and high <= start + size_of(chunk)
                    if inside and ((low - start) % width or (high - start) % width):
                        return f"a rank has {low} to {high} of {row.layout.shape[dim]}, and units of {width} must not be split"
            start += size_of(chunk)
        return ""

    # -- what they need ------------------------------------------------------------------------------------------------------

    def _mixed(self) -> Iterator[Problem]:
        """Operations that need all of what is sharded."""
        joined = {factor for name, shard in self.shards.items() if self._is_joined(name) for factor in shard.factors}
        for name, shard in self.shards.items():
            for factor in () if self._is_joined(name) else shard.factors:
                blocked = self.classes.blocked.get(factor)
                if blocked is None or self._is_inside_of_such(blocked.module):
                    continue
                if not (blocked.reason in _FULL and factor in joined):
                    what = f"{_sentence(blocked)} needs all of what is sharded"
                    yield self._problem("mixed-features", name, what, shard.row)

    def _is_joined(self, name: str) -> bool:
        """Whether a module gathers its output, or splits its input: around it, the tensor is full."""
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and (row.contract.leave in _GATHERED or row.contract.enter is Conversion.SPLIT_LAST)

    def _left_full(self) -> Iterator[Problem]:
        """Parameters that are full on each rank, and have a dim that is sharded elsewhere."""
        factors = {factor for shard in self.shards.values() for factor in shard.factors}
        for name, row in self._computed():
            if row.layout.dim is not None:
                continue
            for dim in self.classes.record.parameters[name]:
                shared = {factor for part in self.classes.parts_of(dim) for factor in part} & factors
                others = [other for other, shard in self.shards.items() if shared & set(shard.factors)]
                if others:
                    what = f"it is full on each rank, and {generic(others[0])}, with which it is computed, is sharded"
                    yield self._problem("left-full", name, what, row)
                    break

    def _entries(self) -> Iterator[Problem]:
        """Row linears whose input is a shard, or full, where they expect the other."""
        made = {
            factor
            for name, shard in self.shards.items()
            if not self._is_joined(name) and not self._sums(name)
            for factor in shard.factors
        }
        for name, shard in self.shards.items():
            if not self._sums(name):
                continue
            if self._splits_input(name) and made & set(shard.factors):
                what = "its input is sharded already, and `input=full` would split it again"
                yield self._problem("input-split-twice", name, what, shard.row, "`rowwise` without `input=full`")
            elif not self._splits_input(name) and not made & set(shard.factors):
                what = "it expects a shard, and nothing that its input is made of is sharded"
                yield self._problem(
                    "input-not-sharded", name, what, shard.row, "`rowwise(input=full)`, or shard what makes its input"
                )

    def _sums(self, name: str) -> bool:
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and row.contract.traits.sums_output

    def _splits_input(self, name: str) -> bool:
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and row.contract.enter is Conversion.SPLIT_LAST

    def _gradients(self) -> Iterator[Problem]:
        """Full parameters whose gradient each rank has in part, and others whose gradient is summed though it is complete."""
        factors = {factor for shard in self.shards.values() for factor in shard.factors}
        partial = self.classes.partial_of(factors)
        for name, row in self._computed():
            if row.layout.dim is not None:
                continue
            if name in partial and not row.partial:
                what = "each rank computes with it for its own shard alone, and its gradient is not summed"
                yield self._problem("unsummed-gradient", name, what, row, "`replicate(gradient=partial)`")
            elif row.partial and name not in partial and self._is_used(name) and not self._shares_input(name):
                what = "each rank has all of its gradient, which would be summed over the ranks"
                yield self._problem("summed-twice", name, what, row, "`replicate`")

    def _shares_input(self, name: str) -> bool:
        """Whether it is in a block that converts its input once: what column linears in it read has partial gradients."""
        parts = name.split(".")
        rows = (self.resolved.modules.get(".".join(parts[:end])) for end in range(1, len(parts)))
        return any(row is not None and row.contract.traits.shares_input for row in rows)

    def _is_used(self, name: str) -> bool:
        return any(name in use.weights for use in self.classes.record.uses)

    # -- messages --------------------------------------------------------------------------------------------------------------

    def _of_parts(self, name: str, parts: tuple[tuple[Factor, ...], ...], row: ParameterRow) -> str:
        planned = [chunk.size for chunk in row.layout.chunks] or [row.layout.shape[row.layout.dim or 0]]
        actual = [size_of(part) for part in parts]
        if len(parts) > 1:
            return f"the forward splits it into parts of {actual}, and the plan shards chunks of {planned}"
        return (
            f"the plan shards chunks of {planned}, and the forward reads it as {[factor.size for factor in parts[0]]}"
        )

    def _problem(self, slug: str, name: str, what: str, row: ParameterRow, fix: str = "") -> Problem:
        module = name.rpartition(".")[0]
        rule = self.resolved.modules.get(module)
        rows = (
            (("rule", f"{row.rule.pattern}: {row.rule.style}"),)
            if rule is None
            else (("rule", f"{rule.rule.pattern}: {rule.rule.style}"),)
        )
        fix = fix or "`parallelize plans derive` shows what can be sharded, and why the rest cannot"
        return Problem(slug, f"{generic(name)}: {what}", row.rule.where, rows, fix)


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


def _sentence(blocked: Blocked) -> str:
    return f"{blocked.reason} ({blocked.line})" if blocked.line else blocked.reason
