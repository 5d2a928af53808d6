"""Checks a plan that somebody wrote against one recorded forward: what it shards must be shardable, and sharded alike
everywhere.

The first forward on real ranks watches operations by name; here the dims of the plan are followed through the whole
forward, before anything runs on a mesh: an operation that needs all of a dim that the plan shards is named, with the
module and the line of its code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from parallelize.base.errors import Problem
from parallelize.plan.dims.factor_analysis import Blocked, FactorAnalysis, output_dim
from parallelize.plan.dims.factors import Dim, Factor, leaves, size_of
from parallelize.plan.dims.trace import record_forward
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.styles.contract import Conversion


class PlanCheck:
    """Compares a resolved plan with what a forward allows.

    Args:
        analysis: of a forward of the same model, recorded with the boundaries of the plan.
        resolved: the plan over `tp`.
    """

    def __init__(self, analysis: FactorAnalysis, resolved: ResolvedPlan):
        self.analysis, self.resolved = analysis, resolved
        self.shards, self.misfits = planned_shards(analysis, resolved)
        self.features = {factor for shard in self.shards.values() for factor in shard.factors}
        self.tokens = {factor for dim in analysis.record.token_shards for factor in leaves(dim)}

    def problems(self) -> list[Problem]:
        """All mistakes, each once for all layers that have it."""
        problems = [
            *(self._problem(misfit.slug, misfit.name, misfit.what, misfit.row) for misfit in self.misfits),
            *self._mixed(),
            *self._crossed(),
            *self._left_full(),
            *self._entries(),
            *self._gradients(),
            *token_problems(self.analysis, self.tokens, self.resolved),
        ]
        return list({(problem.slug, problem.what): problem for problem in problems}.values())

    # -- what the shards need ------------------------------------------------------------------------------------------

    def _mixed(self) -> Iterator[Problem]:
        """Operations that need all of what is sharded, each once with all parameters that it makes unshardable."""
        by_operation: dict[str, dict[str, Shard]] = {}
        for name, shard in self.shards.items():
            for factor in shard.factors:
                blocked = self.analysis.blocked.get(factor)
                if blocked is not None:
                    by_operation.setdefault(_sentence(blocked), {}).setdefault(generic(name), shard)
        for sentence, shards in by_operation.items():
            (name, shard), *others = shards.items()
            problem = self._problem("mixed-features", name, f"{sentence} needs all of what is sharded", shard.row)
            more = [("sharded too", ", ".join(other for other, _ in others))] if others else []
            yield replace(problem, rows=(*problem.rows, *more))

    def _crossed(self) -> Iterator[Problem]:
        """Parameters that are sharded along another factor than those with which they are computed."""
        for name, shard in self.shards.items():
            others = (self.features - set(shard.factors)) & self._factors_of(name)
            other = next((other for other, its in self.shards.items() if others & set(its.factors)), "")
            if other:
                sizes = [[factor.size for factor in part] for part in self._parts_of(name, shard)]
                what = f"its features are read as {sizes[0]}, and {generic(other)} is sharded along another one of them"
                yield self._problem("divided-features", name, what, shard.row)

    def _parts_of(self, name: str, shard: Shard) -> tuple[tuple[Factor, ...], ...]:
        assert shard.row.layout.dim is not None
        return self.analysis.parts_of(self.analysis.record.parameters[name][shard.row.layout.dim])

    def _factors_of(self, name: str) -> set[Factor]:
        """All factors of a parameter."""
        dims = self.analysis.record.parameters[name]
        return {factor for dim in dims for part in self.analysis.parts_of(dim) for factor in part}

    def _left_full(self) -> Iterator[Problem]:
        """Parameters that are full on each rank, and have a dim that is sharded elsewhere."""
        for name, row in self._computed():
            shared = self._factors_of(name) & self.features if row.layout.dim is None else set()
            other = next((other for other, shard in self.shards.items() if shared & set(shard.factors)), "")
            if other:
                what = f"it is full on each rank, and {generic(other)}, with which it is computed, is sharded"
                yield self._problem("left-full", name, what, row)

    def _computed(self) -> Iterator[tuple[str, ParameterRow]]:
        yield from computed_parameters(self.analysis, self.resolved)

    def _entries(self) -> Iterator[Problem]:
        """Row linears whose input is a shard, or full, where they expect the other."""
        sharded_factors = {
            factor for name, shard in self.shards.items() if not self._sums(name) for factor in shard.factors
        }
        sharded_factors |= {factor for misfit in self.misfits for factor in self._factors_of(misfit.name)}
        ran = {weight for use in self.analysis.record.uses for weight in use.weights}
        for name, shard in self.shards.items():
            if not self._sums(name) or self.analysis.record.first_names.get(name, name) not in ran:
                continue  # a layer that the forward skipped has no input
            module = name.rpartition(".")[0]
            if self._splits_input(name):
                if sharded_factors & set(leaves(self.analysis.record.split_inputs.get(module, []))):
                    what = "its input is sharded already, and `input=full` would split it again"
                    yield self._problem("input-split-twice", name, what, shard.row, "`rowwise` without `input=full`")
            elif not sharded_factors & set(shard.factors):
                what = "it expects a shard, and nothing that its input is made of is sharded"
                fix = "`rowwise(input=full)`, or shard what makes its input"
                problem = self._problem("input-not-sharded", name, what, shard.row, fix)
                makers = (("its input is of", rule) for rule in self._makers(name, shard))
                yield replace(problem, rows=(*problem.rows, *makers))

    def _makers(self, name: str, shard: Shard) -> list[str]:
        """The rules of the linears whose output is the input that a row linear sums over."""
        rules = []
        for other, linear in self.analysis.linears.items():
            dims = self.analysis.record.parameters.get(f"{other}.weight")
            row = self.resolved.modules.get(other)
            if dims is None or row is None or name == f"{other}.weight":
                continue
            out = self.analysis.record.gathered_outputs.get(other, dims[output_dim(linear)])
            if {factor for part in self.analysis.parts_of(out) for factor in part} & set(shard.factors):
                rules.append(f"{row.rule.pattern}: {row.rule.style}")
        return list(dict.fromkeys(rules))

    def _sums(self, name: str) -> bool:
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and row.contract.traits.sums_output

    def _splits_input(self, name: str) -> bool:
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and row.contract.enter is Conversion.SPLIT_LAST

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _gradients(self) -> Iterator[Problem]:
        """Full parameters whose gradient each rank has in part, and others whose gradient is summed though it is
        complete."""
        partial = self.analysis.partial_of(self.features | self.tokens)
        for name, row in self._computed():
            if row.layout.dim is not None or self._is_bias_of_sum(name):
                continue
            if name in partial and not row.partial:
                what = "each rank computes with it for its own shard alone, and its gradient is not summed"
                yield self._problem("unsummed-gradient", name, what, row, "`replicate(gradient=partial)`")
            elif row.partial and name not in partial and self._is_used(name) and not self._shares_input(name):
                what = "each rank has all of its gradient, which would be summed over the ranks"
                yield self._problem("summed-twice", name, what, row, "`replicate`")

    def _is_bias_of_sum(self, name: str) -> bool:
        """Whether it is the bias of a row linear, which is added after the sum."""
        row = self.resolved.modules.get(name.rpartition(".")[0])
        return row is not None and row.contract.adds_bias_after_sum and name.endswith(".bias")

    def _shares_input(self, name: str) -> bool:
        """Whether it is in a block that converts its input once: what column linears in it read has partial
        gradients."""
        parts = name.split(".")
        rows = (self.resolved.modules.get(".".join(parts[:end])) for end in range(1, len(parts)))
        return any(row is not None and row.contract.traits.shares_input for row in rows)

    def _is_used(self, name: str) -> bool:
        return any(name in use.weights for use in self.analysis.record.uses)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _problem(self, slug: str, name: str, what: str, row: ParameterRow, fix: str = "") -> Problem:
        module_row = self.resolved.modules.get(name.rpartition(".")[0])
        rule = row.rule if module_row is None else module_row.rule
        fix = fix or "`parallelize plans derive` shows what can be sharded, and why the rest cannot"
        text = f"{rule.pattern}: {rule.style}"
        return Problem(slug, f"{generic(name)}: {what}", row.rule.where, (("rule", text),), fix)


def _sentence(blocked: Blocked) -> str:
    reason = generic(blocked.reason)
    return f"{reason} ({blocked.line})" if blocked.line else reason


# -- token check -----------------------------------------------------------------------------------------------------
# Checks the sequence-parallel region of a plan: inside, a rank has some of the tokens, and no operation may need all
# of them.


_FIX = "a `gather` rule for the module that needs all tokens, or sequence_parallel=False"


def token_problems(analysis: FactorAnalysis, tokens: set[Factor], resolved: ResolvedPlan) -> Iterator[Problem]:
    """Operations, by name, module and line, that need all tokens; else what the shards of tokens are combined with.

    Args:
        analysis: of a forward that was recorded with the boundaries of the plan.
        tokens: the factors of tokens of which a rank has a part.
        resolved: the plan, with sequence parallelism.
    """
    if not tokens:
        return
    operations = list(dict.fromkeys(_operations(analysis, tokens)))
    layers = tuple(f"{region.enter.rpartition('.')[0]}." for region in resolved.regions)
    inside = [operation for operation in operations if operation[1].startswith(layers)]
    for what, module, line in inside or operations or _combined(analysis, tokens):
        place = f" ({line})" if line else ""
        text = (
            f"{what} in {generic(module) or 'the model'}{place} needs all tokens, and a rank has a part of each "
            "sequence in the sequence-parallel region"
        )
        yield Problem("mixed-sequence", text, _where(resolved, module), fix=_FIX)


def _operations(analysis: FactorAnalysis, tokens: set[Factor]) -> Iterator[tuple[str, str, str]]:
    record = analysis.record
    for mix in record.mixes:
        if mix.operation != "a slice" and _has(mix.dim, tokens) and analysis.counts(mix.module, mix.is_known):
            yield mix.operation, mix.module, mix.line
    for cut in record.slices:
        is_of_tokens = _has(cut.dim, tokens) or _has(cut.part, tokens)  # of tokens, or as many rows of a table
        if is_of_tokens and analysis.counts(cut.module, True):
            yield "a slice", cut.module, cut.line
    for contraction in record.contractions:
        if _has(contraction.dim, tokens) and analysis.counts(contraction.module, True):
            yield "a matmul over it", contraction.module, contraction.line


def _combined(analysis: FactorAnalysis, tokens: set[Factor]) -> Iterator[tuple[str, str, str]]:
    """What has all tokens and is combined with shards of them: parameters, constants, inputs. A model may return logits
    of routers."""
    for name, dims in analysis.record.parameters.items():
        if any(_has(dim, tokens) for dim in dims):
            yield f"the parameter {generic(name)}", name.rpartition(".")[0], ""
    for dim, what in analysis.record.fixed:
        if what != "an output of the model" and _has(dim, tokens):
            yield what, "", ""


def _has(dim: Dim, factors: set[Factor]) -> bool:
    return not factors.isdisjoint(leaves(dim))


def _where(resolved: ResolvedPlan, module: str) -> str:
    """The place in the plan of the rule of a module, or of the nearest module above it."""
    while module and module not in resolved.modules:
        module = module.rpartition(".")[0]
    return resolved.modules[module].rule.where if module in resolved.modules else resolved.plan.source


# -- plan trace ------------------------------------------------------------------------------------------------------
# Follows the dims of a plan through one forward of the stock model, and says which mistakes the plan has, before
# anything runs on a mesh.


@dataclass(frozen=True)
class PlanTrace:
    """What one forward says about a plan.

    Attributes:
        problems: mistakes.
        not_followed: operations without a rule, with the modules that called them, through which no dim was followed.
        followed: parameters with a shard that was followed, those of all layers by one name.
    """

    problems: tuple[Problem, ...]
    not_followed: Mapping[str, str]
    followed: frozenset[str]


def trace_plan(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    resolved: ResolvedPlan,
    end: float | None = None,
) -> PlanTrace:
    """Record a forward with the boundaries of a plan, and compare them.

    Args:
        model: the stock model, on any device. inputs: of its forward.
        resolved: a plan over `tp`; with sequence parallelism, tokens are followed too.
        end: of `time.thread_time()`, when it is given up; None: never.

    Returns: what was found. Raises: TimeoutError; whatever the forward raises.
    """
    record = record_forward(model, inputs, resolved, end)

    def counts(module: str, is_known: bool) -> bool:
        return is_known and not computes_otherwise(resolved, module)

    check = PlanCheck(FactorAnalysis(record, model, counts), resolved)
    unknown = {name: module for name, module in record.unknown.items() if not computes_otherwise(resolved, module)}
    return PlanTrace(tuple(check.problems()), unknown, frozenset(map(generic, check.shards)))


# -- planned shards --------------------------------------------------------------------------------------------------
# Which factors a plan shards: what it shards of each parameter, compared with what the forward makes of that dim.


Parts = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Shard:
    """What the plan shards of one parameter. `factors`: the leading one of each part that the forward makes of the
    dim."""

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
    """Whether an operation of this module is part of what a style computes in a way of its own: tables, experts,
    PyTorch's attention."""
    parts = module.split(".")
    rows = (resolved.modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    contracts = (row.contract for row in rows if row is not None)
    return any(c.traits.looks_up or c.sends_tokens or not c.runs_stock_forward for c in contracts)


def computed_parameters(analysis: FactorAnalysis, resolved: ResolvedPlan) -> Iterator[tuple[str, ParameterRow]]:
    """Parameters that the forward computed with, under each name by which a module reads them, where no style does so
    in a way of its own.

    A forward says nothing about the modules that it leaves out: an optional branch, a layer that is skipped at random.
    """
    record = analysis.record
    for row in resolved.parameters.values():
        for name in row.fact.names:
            is_computed = record.first_names.get(name) in record.computed_with
            if is_computed and not computes_otherwise(resolved, name.rpartition(".")[0]):
                yield name, row


def planned_shards(analysis: FactorAnalysis, resolved: ResolvedPlan) -> tuple[dict[str, Shard], list[PlanConflict]]:
    """(the shards by parameter, those that do not follow the parts of a dim or that cut one of its units)."""
    shards: dict[str, Shard] = {}
    misfits: list[PlanConflict] = []
    for name, row in computed_parameters(analysis, resolved):
        dim = row.layout.dim
        if dim is None or row.axis != "tp" or _is_full(row):
            continue
        factors = analysis.record.parameters[name][dim]
        divisions = _divisions(analysis, factors)
        chunks = next(filter(None, (_chunks(parts, row) for parts in divisions)), None)
        cut = "" if chunks is None else _cut_unit(analysis, chunks, row)
        if chunks is None:
            misfits.append(
                PlanConflict(
                    name,
                    "divided-features",
                    _parts_mismatch(divisions[0], row, _place_of_split(analysis, factors)),
                    row,
                )
            )
        elif cut:
            misfits.append(PlanConflict(name, "divided-units", cut, row))
        else:
            shards[name] = Shard(row, tuple(chunk[0] for chunk in _divided(chunks, row) if chunk))
    return shards, misfits


def _divisions(analysis: FactorAnalysis, dim: list[Factor]) -> list[Parts]:
    """The ways to see a dim as parts: its factors; and where the forward splits one of them, the parts of that within
    each of the factors before it."""
    flat = tuple(leaves(dim))
    divisions = [analysis.outer_parts_of(dim), analysis.parts_of(dim)]
    for index, factor in enumerate(flat if len(flat) > 1 else ()):
        if factor in analysis.parts:
            parts, after = analysis.parts_of([factor]), flat[index + 1 :]
            divisions.append(tuple((*part, *after) for _ in range(size_of(flat[:index])) for part in parts))
    return divisions


def _chunks(parts: Parts, row: ParameterRow) -> list[tuple[Factor, ...]] | None:
    """The chunks of a dim that the plan shards each by itself, as factors; None where they are not those of the
    forward."""
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


def _cut_unit(analysis: FactorAnalysis, chunks: list[tuple[Factor, ...]], row: ParameterRow) -> str:
    """Whether a range begins or ends inside of what the leading factor counts, such as a head."""
    dim, start = row.layout.dim, 0
    assert dim is not None
    for chunk in chunks:
        repeated = 1 + next((i for i, factor in enumerate(chunk[1:]) if factor not in analysis.repeats), len(chunk) - 1)
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


def _place_of_split(analysis: FactorAnalysis, dim: list[Factor]) -> str:
    """The line of the model's code that splits a dim; empty where it is not known."""
    factors = set(leaves(dim))
    cut = next((cut for cut in analysis.record.slices if cut.line and factors & set(leaves(cut.dim))), None)
    return f" in {generic(cut.module) or 'the model'} ({cut.line})" if cut is not None else ""


def _parts_mismatch(parts: Parts, row: ParameterRow, place: str) -> str:
    """place: where the forward splits it."""
    planned = [chunk.size for chunk in row.layout.chunks] or [row.layout.shape[row.layout.dim or 0]]
    if len(parts) > 1:
        actual = [size_of(part) for part in parts]
        return f"the forward splits it into parts of {actual}{place}, and the plan shards chunks of {planned}"
    return f"the plan shards chunks of {planned}, and the forward reads it as {[factor.size for factor in parts[0]]}"
