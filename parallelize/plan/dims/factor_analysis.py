"""Which factors may be sharded: those that begin in column linears, end in row linears, and are needed in full by
nothing between."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from parallelize.plan.block_formats import is_conv1d
from parallelize.plan.dims.factors import Dim, Factor, leaves, size_of
from parallelize.plan.dims.record import FullDimUse, Record, Slice
from parallelize.plan.dims.shardable_factors import Place, ShardableFactor, disjoint, join, joined_groups, linears_of


@dataclass(frozen=True)
class Blocked:
    """Why a factor cannot be sharded. `line`: of the model's code, and `module`: that ran it, where they are known."""

    reason: str
    line: str = ""
    module: str = ""


@dataclass(frozen=True)
class UnshardedLinear:
    """A linear that is not sharded, and why."""

    module: str
    reason: str


@dataclass
class Choice:
    """What is sharded.

    Attributes:
        candidates: the factors that are sharded.
        partial: parameters, by name, that are full on each rank and see a part of the data there.
        whole: linears that are not sharded.
    """

    candidates: list[ShardableFactor]
    partial: set[str]
    whole: list[UnshardedLinear]


class FactorAnalysis:
    """The factors of a record, and what is known of each.

    Args:
        record: of a forward. model: that ran it.
        counts: (module, whether there is a rule for the operation) -> whether an operation that needs all of a dim is
            counted. None: all are.
    """

    def __init__(self, record: Record, model: nn.Module, counts: Callable[[str, bool], bool] | None = None):
        self.record = record
        self.counts = counts or (lambda module, is_known: True)
        self.modules = dict(model.named_modules())
        self.linears = {name: module for name, module in self.modules.items() if is_linear(module)}
        self.norms = _norms_over_features(record, self.modules)
        self.parts = divide_into_parts(record)
        self.blocked: dict[Factor, Blocked] = {}
        self._block()
        # of what is expanded, a width of heads is needed in full: by a norm, whose result is expanded over it, or by
        # attention
        self.repeats = {factor for dim in record.repeats for factor in leaves(dim) if factor not in self.blocked}

    # -- what forbids sharding -----------------------------------------------------------------------------------------

    def _block(self) -> None:
        for dim, what in self.record.fixed:
            self._forbid(dim, what)
        for mix in self.record.mixes:
            if not self.counts(mix.module, mix.is_known):
                continue
            if mix.operation in _OF_NORMS and mix.module in self.norms:
                self._forbid(
                    self._outside_of(mix.dim, self.norms[mix.module]), f"a norm in {mix.module}", mix.line, mix.module
                )
            else:
                self._forbid(mix.dim, f"{mix.operation} in {mix.module or 'the model'}", mix.line, mix.module)
        for lookup in self.record.lookups:
            if self.counts(lookup.module, True):
                self._forbid(lookup.dim, f"rows of {lookup.table or 'a table'} are looked up")
        for contraction in self.record.contractions:
            module, _, key = contraction.weight.rpartition(".")
            if key != "weight" or module not in self.linears or contraction.module != module:
                what = f"a matmul over it in {contraction.module or 'the model'}"
                if self.counts(contraction.module, True):
                    self._forbid(contraction.dim, what, contraction.line, contraction.module)
        self._block_parts()

    def _block_parts(self) -> None:
        """What needs all of a dim needs all of its parts."""
        pending = [factor for factor in self.parts if factor in self.blocked]
        while pending:
            factor = pending.pop()
            reason = self.blocked[factor]
            for leaf in (leaf for part in self.parts[factor] for leaf in leaves(part)):
                if leaf not in self.blocked:
                    self.blocked[leaf] = reason
                    pending += [leaf] if leaf in self.parts else []

    def _outside_of(self, dim: Dim, weight: Dim) -> Dim:
        """The factors of a dim that the weight of its norm does not have."""
        return [factor for factor in leaves(dim) if factor not in set(leaves(weight))]

    def _forbid(self, dim: Dim, reason: str, line: str = "", module: str = "") -> None:
        for factor in leaves(dim):
            self.blocked.setdefault(factor, Blocked(reason, line, module))

    # -- candidates ----------------------------------------------------------------------------------------------------

    def candidates(self) -> list[ShardableFactor]:
        """The factors that may be sharded, those of the largest parameters first."""
        places: dict[Factor, list[Place]] = defaultdict(list)
        for name, dims in self.record.parameters.items():
            for index, dim in enumerate(dims):
                parts = self.parts_of(dim)
                for factor in {factor for part in parts for factor in part}:
                    places[factor].append(Place(name, index, parts))
        unblocked = [ShardableFactor(factor, where) for factor, where in places.items() if factor not in self.blocked]
        usable = {}
        for candidate in unblocked:
            reason = self._misplaced(candidate)
            if reason:
                self.blocked[candidate.factor] = Blocked(reason)
            elif candidate.columns and candidate.rows:
                usable[candidate.factor] = candidate
        for candidate in join(usable):
            first = min(candidate.linears)
            self.blocked[candidate.factor] = Blocked(f"{first} has it beside other features that are not sharded")
        return sorted(usable.values(), key=lambda candidate: -self._elements([candidate]))

    def _elements(self, group: Iterable[ShardableFactor]) -> int:
        parameters = {place.parameter for candidate in group for place in candidate.places}
        return sum(prod(map(size_of, self.record.parameters[name])) for name in parameters)

    def parts_of(self, dim: Dim) -> tuple[tuple[Factor, ...], ...]:
        """The factors of a dim; where the forward makes it of parts, or splits it, those of each part."""
        flat = leaves(dim)
        if len(flat) == 1 and flat[0] in self.parts:
            return tuple(inner for part in self.parts[flat[0]] for inner in self.parts_of(part))
        return (tuple(flat),)

    def outer_parts_of(self, dim: Dim) -> tuple[tuple[Factor, ...], ...]:
        """The same, where a part that is split again is one."""
        flat = leaves(dim)
        is_split = len(flat) == 1 and flat[0] in self.parts
        return tuple(tuple(leaves(part)) for part in self.parts[flat[0]]) if is_split else (tuple(flat),)

    def _misplaced(self, candidate: ShardableFactor) -> str:
        """Why the places of a factor cannot be sharded; empty: they can. Notes its column and row linears."""
        tables = {lookup.table for lookup in self.record.lookups if lookup.of_tokens}
        for place in candidate.places:
            module, _, key = place.parameter.rpartition(".")
            linear = self.linears.get(module)
            if linear is None:
                # a residual stream: what its layers have inside is sharded instead
                if place.dim == 1 and place.parameter in tables:
                    return f"it is the width of the embeddings of {module}"
                if is_depthwise(self.modules.get(module)):
                    if len(place.parts) > 1 and any(part[:1] != (candidate.factor,) for part in place.parts):
                        return f"{module} has it inside of another dim"
                    continue
                if is_grouped(self.modules.get(module)):
                    if len(place.parts) > 1 or place.dim != 0 or place.parts[0][0] is not candidate.factor:
                        return f"{module} has it inside of a group"
                    continue
                if isinstance(self.modules.get(module), nn.modules.conv._ConvNd):
                    return f"{module} is a convolution in groups"
                if place.parts[0][0] is not candidate.factor or len(place.parts) > 1:
                    return f"{place.parameter} has it inside of another dim"
                continue
            if is_parametrized(linear):
                return f"the weight of {module} is {_PARAMETRIZED}"
            is_output = key == "bias" or place.dim == output_dim(linear)
            is_chunk = is_output and len(place.parts) == 1  # after a count of equal chunks
            if not (is_chunk or self._leads(candidate.factor, place)):
                return f"the {'output' if is_output else 'input'} of {module} has it inside of another dim"
            candidate.joined |= {part[0] for part in place.parts if candidate.factor not in part}
            linears = candidate.columns if is_output else candidate.rows
            if module not in linears:
                linears.append(module)
        both = next((name for name in candidate.columns if name in candidate.rows), "")
        return f"the input and the output of {both} are added" if both else ""

    def _leads(self, factor: Factor, place: Place) -> bool:
        """Whether a shard of each part is a range: the factor is the first, or not in it, where another one is."""
        return all(part and (part[0] is factor or factor not in part) for part in place.parts)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, without: Iterable[str] = ()) -> Choice:
        """Choose factors so that each linear is a column or a row linear, the largest first.

        Args:
            without: linears that are not to be sharded.
        """
        banned: set[str] = set(without)
        beside_banned: dict[str, str] = {}
        possible: list[list[ShardableFactor]] = []
        for group in joined_groups(self.candidates(), self._elements):
            linears = linears_of(group)
            reason = self._read_beside(group)
            if reason:
                self.blocked |= {candidate.factor: Blocked(reason) for candidate in group}
            elif linears & banned:
                beside_banned |= dict.fromkeys(linears - banned, min(linears & banned))
            else:
                possible.append(group)
        chosen = [candidate for group in disjoint(possible, self._elements) for candidate in group]
        used = linears_of(chosen)
        factors = {candidate.factor for candidate in chosen}
        columns = {name for candidate in chosen for name in candidate.columns}
        return Choice(chosen, self.partial_of(factors, columns), self._whole(used, banned, beside_banned))

    def _read_beside(self, group: list[ShardableFactor]) -> str:
        """Whether an activation that has a gradient and none of these factors meets one with them outside of a column
        linear, and of a block whose input is converted for all that is in it, which is noted."""
        block = self._block_of(group)
        factors = {candidate.factor for candidate in group}
        columns = {name for candidate in group for name in candidate.columns}
        for use in self.record.uses:
            if use.operand is None or use.module in columns or use.module in self.norms:
                continue
            if self.has(use.out, factors) and not self.has(use.operand, factors):
                if not block or not f"{use.module}.".startswith(f"{block}."):
                    where = use.module or "the model"
                    return f"{use.operation} in {where} reads it beside a full tensor that has a gradient"
                for candidate in group:
                    candidate.block = block
        return ""

    def _block_of(self, group: list[ShardableFactor]) -> str:
        """The innermost module that contains all linears of these factors, if it is called on hidden states and is not
        a whole layer."""
        names = [name.split(".") for name in linears_of(group)]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
        block = ".".join(parts[0] for parts in common)
        is_called = any(call.module == block for call in self.record.calls)
        *outer, last = block.split(".")
        is_layer = last.isdigit() and not any(part.isdigit() for part in outer)
        return block if is_called and not is_layer else ""

    def partial_of(self, factors: set[Factor], columns: Set[str] = frozenset()) -> set[str]:
        """Parameters without a sharded factor whose results have one: each rank has a part of their gradient.

        columns: sharded column linears, which sum the gradient of their input over ranks.
        """
        return {
            name
            for use in self.record.uses
            if self.has(use.out, factors)
            for name in use.weights
            if not self.has(self.record.parameters[name], factors) and not use.passed.get(name, frozenset()) & columns
        }

    def has(self, dims: Iterable[Dim], factors: set[Factor]) -> bool:
        """Whether one of these dims, or a part of it, has one of the factors."""
        return any(factor in factors for dim in dims for part in self.parts_of(dim) for factor in part)

    def _whole(self, used: set[str], banned: set[str], beside_banned: dict[str, str]) -> list[UnshardedLinear]:
        """beside_banned: linears whose only partners are banned, with one of these."""
        reasons = {name: f"the proof failed with {partner} sharded" for name, partner in beside_banned.items()}
        return [
            UnshardedLinear(name, reasons.get(name) or self._reason(name, banned))
            for name in self.linears
            if name not in used
        ]

    def _reason(self, name: str, banned: set[str]) -> str:
        if name in banned:
            return PROOF_FAILED
        linear = self.linears[name]
        dims = self.record.parameters.get(f"{name}.weight".lstrip("."))
        if dims is None and is_parametrized(linear):
            return f"its weight is {_PARAMETRIZED}"
        if dims is None:
            return "its weight is quantized: derive the plan before" if hasattr(linear, "packs") else "it has no weight"
        out = [factor for part in self.parts_of(dims[output_dim(linear)]) for factor in part]
        for factor in out:
            if factor in self.blocked:
                return self.blocked[factor].reason
        return "no row linear sums over its output"


PROOF_FAILED = "the proof failed with it sharded"
_PARAMETRIZED = "computed from other parameters (torch.nn.utils.parametrize)"
_OF_NORMS = ("mean", "a norm over it", "sum")


def _norms_over_features(record: Record, modules: Mapping[str, nn.Module]) -> dict[str, Dim]:
    """RMS norms over several heads, or over features that no other norm has, as those of an MLP are and those of the
    residual are not: a style of their own sums the mean over ranks. The dim of the weight, by module."""
    norms: dict[str, Dim] = {}
    for name, module in modules.items():
        own = dict(module.named_parameters())
        dims = record.parameters.get(f"{name}.weight")
        if list(own) == ["weight"] and dims is not None and len(dims) == 1 and leaves(dims[0]):
            norms[name] = dims[0]
    counts = Counter(factor for dim in norms.values() for factor in leaves(dim))
    return {name: dim for name, dim in norms.items() if len(leaves(dim)) > 1 or counts[leaves(dim)[0]] == 1}


def is_linear(module: nn.Module) -> bool:
    """Linear, the Conv1D of `transformers`, which stores [in, out], or a convolution that sums over all of its
    channels."""
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_convolution(module)


def is_convolution(module: nn.Module | None) -> bool:
    """Whether a module is a linear over channels, at each position and its neighbors."""
    return isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1 and not module.transposed


def is_depthwise(module: nn.Module | None) -> bool:
    """Whether a module convolves each channel by itself."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed:
        return False
    return module.groups == module.in_channels == module.out_channels and module.groups > 1


def is_grouped(module: nn.Module | None) -> bool:
    """Whether a module convolves groups of several channels."""
    return isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and not module.transposed


def output_dim(linear: nn.Module) -> int:
    return 1 if is_conv1d(linear) else 0


# -- parts -----------------------------------------------------------------------------------------------------------
# Dims that are made of others, one after another: what a forward splits a dim into, and what it concatenates to one.
# A packed weight of queries, keys and values is split after its matmul; the inputs of a convolution of all three are
# concatenated before, and its results are split again. Each rank has its range of each part, so that what leads every
# part may be sharded.


Ranges = dict[tuple[int, int], list[Slice]]


def divide_into_parts(record: Record) -> dict[Factor, list[Dim]]:
    """The dims that make up a dim completely, in order; a part may be made of parts itself. Other ranges need all of
    it: they are added to the record's mixes."""
    ranges = _ranges(record)
    while True:
        for factor, own in ranges.items():
            if _is_complete(factor, own):
                _tie_alike(record, own)
        tied = _ranges(record)  # ties may have made two of these dims one, or divided one
        if tied.keys() == ranges.keys():
            break
        ranges = tied
    complete = {factor: own for factor, own in ranges.items() if _is_complete(factor, own)}
    known = {id(cut) for own in complete.values() for same in own.values() for cut in same}
    record.mixes += [mix for cut in record.slices if id(cut) not in known for mix in _mixed(cut)]
    return {factor: [own[key][0].part for key in sorted(own)] for factor, own in complete.items()}


def _ranges(record: Record) -> dict[Factor, Ranges]:
    """The ranges of each dim that is one factor."""
    ranges: dict[Factor, Ranges] = defaultdict(dict)
    for cut in record.slices:
        flat = leaves(cut.dim)
        if len(flat) == 1:
            ranges[flat[0]].setdefault((cut.start, cut.stop), []).append(cut)
    return ranges


def _is_complete(factor: Factor, ranges: Ranges) -> bool:
    """Whether each range begins where the one before it ends, from the beginning of a dim to its end."""
    ordered = sorted(ranges)
    ends = [0, *(stop for _, stop in ordered)]
    return all(start == end for (start, _), end in zip(ordered, ends, strict=False)) and ends[-1] == factor.size


def _tie_alike(record: Record, ranges: Ranges) -> None:
    for first, *others in ranges.values():
        for cut in others:
            record.tie(first.part, cut.part, "a slice")


def _mixed(cut: Slice) -> list[FullDimUse]:
    """What needs all of a dim: a range of it, or a concatenation, which needs all of its operand too."""
    if not cut.joined:
        return [FullDimUse(cut.dim, "a slice", cut.module, cut.line)]
    return [FullDimUse(dim, "a concatenation along it", cut.module, cut.line) for dim in (cut.dim, cut.part)]
