"""A plan's rules, sizes and local attributes, from the choice of what is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn

from parallelize.axes.tensor.layers.norms import check_gated_norm, check_rms_norm
from parallelize.base.errors import ModelError
from parallelize.plan.dims.factor_analysis import Choice, FactorAnalysis, is_depthwise, is_grouped, output_dim
from parallelize.plan.dims.factors import Factor, leaves, size_of
from parallelize.plan.dims.shardable_factors import Place, ShardableFactor
from parallelize.plan.model_facts import describe
from parallelize.plan.styles.style import REST
from parallelize.tools.derivation.patterns import leaves_something, note_partial, other_parameters, vocabulary_rules
from parallelize.tools.derivation.plan_text import has_width
from parallelize.tools.derivation.region_search import (
    FULL_GRADIENT,
    blocks_that_read_shards,
    partial_inside,
    with_argument,
)
from parallelize.tools.derivation.spread_sizes import spread_local

_CHANNEL_NORMS = (nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_PROJECTIONS = ("colwise", "rowwise")
_HEAD_FIELDS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads")


@dataclass
class Draft:
    """What a plan file says.

    Attributes:
        styles: by the name of a module or parameter.
        sizes: by name, the field of the config or the number.
        local: by module, the size of each attribute that becomes local.
        whole: why linears are not sharded, by name.
        below: the sizes of which several ranks may store the same unit.
        default: the style of all other modules with parameters; empty: there are none.
        regions: the sections for sequence parallelism.
        gathered: of linears whose output is gathered, why no pair takes them.
        by_tensor: modules whose forwards need what is local in full too.
        layers: the list of layers, where no region names it.
        attention: over `cp`: the kind of each module that mixes the tokens of the text.
    """

    default: str = "replicate"
    regions: list[dict[str, str]] = field(default_factory=list)
    styles: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, str | int] = field(default_factory=dict)
    local: dict[str, dict[str, str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)
    below: list[str] = field(default_factory=list)
    by_tensor: frozenset[str] = frozenset()
    layers: str = ""
    attention: dict[str, str] = field(default_factory=dict)


class Drafting:
    """Writes the draft of one choice.

    Args:
        fields: the integer fields of the model's config, by name. Empty: sizes are numbers.
        banned: modules that are left whole.
        tp: the number of ranks that must divide heads and the like.
        logits: how the head returns them, "vocabulary" or "full"; empty: the tables of the vocabulary are left whole.
    """

    def __init__(
        self,
        model: nn.Module,
        analysis: FactorAnalysis,
        choice: Choice,
        fields: Mapping[str, int],
        logits: str,
        banned: Set[str] = frozenset(),
        tp: int = 2,
    ):
        self.banned, self.tp = banned, tp
        self.model, self.analysis, self.choice, self.fields = model, analysis, choice, fields
        self.draft = Draft()
        self.logits = logits
        self.ran = {call.module for call in analysis.record.calls}
        self.unit = "heads"  # what a size without a field of the config counts

    def run(self) -> Draft:
        reasons = {candidate.factor: self._refused(candidate) for candidate in self.choice.candidates}
        for candidate in self.choice.candidates:
            refused = next(filter(None, (reasons[factor] for factor in (candidate.factor, *candidate.joined))), "")
            if refused:
                self.draft.whole |= dict.fromkeys(candidate.linears, refused)
            else:
                self._shard(candidate)
        self._shard_experts()
        self._shard_multihead()
        if self.logits:
            styles = self.draft.styles
            styles |= vocabulary_rules(self.analysis, self.fields, styles, self.logits)
        counts = {name: self._value(source) for name, source in self.draft.sizes.items()}
        spread_local(self.draft.local, self.draft.styles, counts, self.analysis.modules)
        note_partial(self.draft.styles, self.model, self.choice.partial)
        self._share_inputs()
        for module in self.draft.local:  # what is said of an input is said of a module that has a rule
            if any(self._is_width(module, attribute) for attribute in self.draft.local[module]):
                self.draft.styles.setdefault(module, "replicate")
        self.draft.styles |= dict.fromkeys(self._beside_shards(), FULL_GRADIENT)
        self.draft.styles |= dict.fromkeys(other_parameters(self.model, self.draft.styles), "replicate")
        self.draft.whole |= {
            whole.module: whole.reason for whole in self.choice.whole if whole.module not in self.draft.styles
        }
        self.draft.default = "replicate" if leaves_something(self.model, self.draft.styles) else ""
        return self.draft

    def _refused(self, candidate: ShardableFactor) -> str:
        """Why a factor is not sharded, though nothing needs all of it; empty: it is."""
        size = candidate.factor.size
        if not self._has_names(candidate):
            return f"no field of the config is {size}"
        if (self._has_units(candidate) or self._has_groups(candidate)) and self._is_uneven(candidate):
            return f"tp={self.tp} does not divide its {size} units"
        return self._refused_norm(candidate)

    def _has_names(self, candidate: ShardableFactor) -> bool:
        """Whether the counts of a factor are fields of the config: a number would be that of the small model.

        The groups of a norm may be a number, as in code that always makes 32: another model's are compared with it
        where it is applied.
        """
        counts = {self._count(candidate, part) for part in self._parts(candidate)}
        known = {*self.fields.values(), *(norm.num_groups for norm in self._group_norms(candidate))}
        return not self.fields or not self._has_units(candidate) or counts <= known

    def _group_norms(self, candidate: ShardableFactor) -> list[nn.GroupNorm]:
        modules = (self.analysis.modules[place.parameter.rpartition(".")[0]] for place in candidate.places)
        return [module for module in modules if isinstance(module, nn.GroupNorm)]

    def _has_units(self, candidate: ShardableFactor) -> bool:
        """Whether a size has a name: its units must not be split, or an attribute follows it."""
        if self._runs(candidate):
            return True
        if self._has_groups(candidate):
            return False  # the groups of a convolution are known from it
        return any(self._count(candidate, part) < size_of(part) for part in self._parts(candidate))

    def _has_groups(self, candidate: ShardableFactor) -> bool:
        """Whether a factor is the groups of a convolution."""
        modules = (self.analysis.modules[place.parameter.rpartition(".")[0]] for place in candidate.places)
        return any(is_grouped(module) and not is_depthwise(module) for module in modules)

    # -- linears -------------------------------------------------------------------------------------------------------

    def _shard(self, candidate: ShardableFactor) -> None:
        self.unit = "groups" if self._group_norms(candidate) else "heads"
        runs = self._runs(candidate)
        has_units = self._has_units(candidate)
        for place in candidate.places:
            module, _, key = place.parameter.rpartition(".")
            linear = self.analysis.linears.get(module)
            owner = self.analysis.modules[module]
            if is_depthwise(owner):
                units = self._units(candidate, place, has_units)
                self.draft.styles[module] = f"shard(0{', unit=' if has_units else ', ' if units else ''}{units})"
            elif isinstance(owner, _CHANNEL_NORMS):
                self.draft.styles[module] = _call("channel_norm", self._units(candidate, place, has_units))
            elif self._is_gated_norm(module):
                self.draft.styles[module] = f"gated_norm({self._size_name(self._count(candidate, place.parts[0]))})"
            elif module in self.analysis.norms and self._needs_all(module, candidate.factor):
                units = self._size_name(self._count(candidate, place.parts[0])) if has_units else ""
                self.draft.styles[module] = _call("rms_norm", units)
            elif is_grouped(owner):
                self.draft.styles[module] = "shard(0)"
            elif linear is None:
                size = f", unit={self._units(candidate, place, has_units)}" if has_units else ""
                self.draft.styles[place.parameter] = f"shard({place.dim}{size})"
            elif key == "weight" and place.dim == output_dim(linear):
                self.draft.styles[module] = _call("colwise", self._units(candidate, place, has_units))
                if has_units:
                    self._note_count(candidate, place)
            elif key == "weight":
                is_packed = len(place.parts) > 1
                units = self._size_name(self._count(candidate, place.parts[0])) if has_units and not is_packed else ""
                self.draft.styles[module] = _call(
                    "rowwise", self._units(candidate, place, has_units) if is_packed else units
                )
        if has_units and self._may_share_units(candidate):
            self.draft.below.append(self._size_name(candidate.factor.size))
        for (module, attribute), run in runs.items():
            self.draft.local.setdefault(module, {})[attribute] = self._local_size(candidate, run)
        for ratio in self.analysis.record.ratios:  # a quotient stays what it is if both are divided
            (module, attribute, _), (divided, by, _) = ratio.dividend, ratio.divisor
            if self._is_width_of_shard(candidate, module, attribute):
                continue
            if (divided, by) in runs and (module, attribute) not in runs:
                self.draft.local.setdefault(module, {})[attribute] = self.draft.local[divided][by]

    def _parts(self, candidate: ShardableFactor) -> list[tuple[Factor, ...]]:
        return [part for place in candidate.places for part in place.parts if candidate.factor in part]

    def _units(self, candidate: ShardableFactor, place: Place, has_units: bool) -> str:
        """The argument of `colwise`."""
        parts = self._chunks(candidate, place)
        if len({part[0] for part in parts}) > 1:
            return " + ".join(map(self._joined_units, parts))
        if has_units:
            return self._sum_of_units(candidate, parts)
        return f"chunks={len(parts)}" if len(parts) > 1 else ""

    def _sum_of_units(self, candidate: ShardableFactor, parts: Sequence[tuple[Factor, ...]]) -> str:
        """The units of each part, with their widths where those differ."""
        widths = [size_of(part) // self._count(candidate, part) for part in parts]
        if len(set(widths)) == 1:
            return " + ".join(self._unit(candidate, part) for part in parts)
        counts = [self._size_name(self._count(candidate, part)) for part in parts]
        return " + ".join(f"{count}*{self._width_name(width)}" for count, width in zip(counts, widths, strict=True))

    def _joined_units(self, part: tuple[Factor, ...]) -> str:
        """The units of one part of a dim, with their width; the rest, for features that have no name."""
        candidate = next(each for each in self.choice.candidates if each.factor is part[0])
        if not self._has_units(candidate):
            return REST
        count = self._count(candidate, part)
        return f"{self._size_name(count)}*{self._width_name(size_of(part) // count)}"

    def _width_name(self, width: int) -> str:
        """The size that is a width of units; the number where a field of the config has none."""
        if width == 1 or width not in self.fields.values():
            return str(width)
        name = next((name for name, source in self.draft.sizes.items() if self._value(source) == width), "")
        source = str(self._source(width))
        if not name:
            name = source.rpartition(".")[2]
            self.draft.sizes[name] = source
        return name

    def _unit(self, candidate: ShardableFactor, part: tuple[Factor, ...]) -> str:
        """The size of a part, with the width of its units where a head has one feature, as of a gate."""
        name = self._size_name(self._count(candidate, part))
        is_of_heads = "heads" in name
        return f"{name}*1" if is_of_heads and self._count(candidate, part) == size_of(part) else name

    def _chunks(self, candidate: ShardableFactor, place: Place) -> list[tuple[Factor, ...]]:
        """The parts of a dim, each of which begins with the factor: [3, heads, width] are three."""
        if len(place.parts) > 1:
            return list(place.parts)
        (part,) = place.parts
        index = part.index(candidate.factor)
        return [part[index:]] * size_of(part[:index])

    def _count(self, candidate: ShardableFactor, part: tuple[Factor, ...]) -> int:
        """The number of units in a part: of heads, where several query heads follow each key/value head."""
        count, rest = candidate.factor.size, part[part.index(candidate.factor) + 1 :]
        for factor in rest:
            if factor not in self.analysis.repeats:
                break
            count *= factor.size
        return count

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _size_name(self, count: int) -> str:
        for name, source in self.draft.sizes.items():
            if self._value(source) == count:
                return name
        source = self._source(count)
        name = self.unit if isinstance(source, int) else _name_of_size(source)
        if name in self.draft.sizes:
            name = f"{name}_{count}" if isinstance(source, int) else source.rpartition(".")[2]
        self.draft.sizes[name] = source
        return name

    def _value(self, source: str | int) -> int:
        return self.fields[source] if isinstance(source, str) else source

    def _source(self, count: int) -> str | int:
        """The field of the config that has this count; the number where there is none."""
        names = [name for name, value in self.fields.items() if value == count]
        names.sort(key=lambda name: (name not in _HEAD_FIELDS, "head" not in name, name))
        return names[0] if names else count

    # -- attributes ----------------------------------------------------------------------------------------------------

    def _runs(self, candidate: ShardableFactor) -> dict[tuple[str, str], tuple[Factor, ...]]:
        """The attributes that follow this factor, by module, and the factors whose product each is."""
        runs: dict[tuple[str, str], tuple[Factor, ...]] = {}
        reads = self.analysis.record.reads
        whole = {(read.module, read.attribute) for read in reads if size_of(leaves(read.dim)) == read.value}
        for read in reads:
            if read.module in self.analysis.linears:  # whose forward is the style's
                continue
            # of factors of one dim, the first may be as large as the one that is meant: a dim of its own tells
            if (read.module, read.attribute) in whole and size_of(leaves(read.dim)) != read.value:
                continue
            owner = read.attribute.partition(".")[0]
            if not has_width(read.attribute) and owner not in vars(self.analysis.modules[read.module]):
                continue
            run = _run_of(leaves(read.dim), read.value)
            if run is None or (self._is_width(read.module, read.attribute) and candidate.factor not in run):
                continue
            if self._is_width_of_shard(candidate, read.module, read.attribute):
                continue
            if candidate.factor in run or self._parts_of_sum(candidate, run) or self._is_ratio(candidate, run):
                runs[read.module, read.attribute] = run
        return runs

    def _is_width(self, module: str, attribute: str) -> bool:
        return (module, attribute) in self.analysis.record.widths

    def _is_width_of_shard(self, candidate: ShardableFactor, module: str, attribute: str) -> bool:
        """Whether it is the width of an input that is a shard of this factor, and answers a local size by itself."""
        width = self.analysis.record.widths.get((module, attribute))
        return width is not None and self.analysis.has([width], {candidate.factor})

    def _note_count(self, candidate: ShardableFactor, place: Place) -> None:
        """An attribute of the linear's block with the name of the config's field counts the same heads, read or not."""
        parent = place.parameter.rpartition(".")[0].rpartition(".")[0]
        for part in self._chunks(candidate, place):
            if candidate.factor not in part:
                continue
            source = self._source(self._count(candidate, part))
            if parent and isinstance(source, str) and type(vars(self.analysis.modules[parent]).get(source)) is int:
                self.draft.local.setdefault(parent, {})[source] = self._size_name(self._count(candidate, part))

    def _parts_of_sum(self, candidate: ShardableFactor, run: tuple[Factor, ...]) -> tuple[tuple[Factor, ...], ...]:
        """The parts that make up a dim, where each begins with this factor; else none."""
        parts = self.analysis.parts_of(list(run))
        return parts if len(parts) > 1 and all(part and part[0] is candidate.factor for part in parts) else ()

    def _local_size(self, candidate: ShardableFactor, run: tuple[Factor, ...]) -> str:
        if candidate.factor in run:
            return self._size_name(self._count(candidate, run))
        if parts := self._parts_of_sum(candidate, run):
            return self._sum_of_units(candidate, parts)
        kv_heads = candidate.factor.size
        return f"{self._size_name(kv_heads * size_of(run))}/{self._size_name(kv_heads)}"

    def _is_ratio(self, candidate: ShardableFactor, run: tuple[Factor, ...]) -> bool:
        """Whether a run of factors is the number of query heads for each key/value head of this factor."""
        if any(factor not in self.analysis.repeats for factor in run):
            return False
        return any(
            part[i : i + 1 + len(run)] == (candidate.factor, *run)
            for part in self._parts(candidate)
            for i in range(len(part))
        )

    def _shard_experts(self) -> None:
        """Stacked experts, as the style knows them; the proof tells whether it computes what they do."""
        for name, facts in describe(self.model).modules.items():
            if facts.kind == "experts" and name not in self.banned:
                self.draft.styles[name] = "experts"

    def _shard_multihead(self) -> None:
        """PyTorch's attention reads the weights of its child, so that both have rules of their own."""
        for name, module in self.analysis.modules.items():
            if isinstance(module, nn.MultiheadAttention):
                out = f"{name}.out_proj".lstrip(".")
                if name in self.banned or name not in self.ran:
                    self.draft.styles[name] = self.draft.styles[out] = "replicate"
                    continue
                heads = self._size_name(module.num_heads)
                self.draft.styles[name], self.draft.styles[out] = f"multihead({heads})", f"rowwise({heads})"

    # -- state-space mixers --------------------------------------------------------------------------------------------

    def _is_gated_norm(self, module: str) -> bool:
        """Whether a module is the norm of a gated output by groups, which a style computes also where a group is on
        several ranks."""
        if module not in self.analysis.norms:
            return False
        with suppress(Exception):  # a norm of one input, or with arguments of other names
            check_gated_norm(self.analysis.modules[module], module)
            return True
        return False

    def _refused_norm(self, candidate: ShardableFactor) -> str:
        """Why a norm over all of a factor cannot be computed on shards of it; empty: it can, or there is none."""
        for place in candidate.places:
            module = place.parameter.rpartition(".")[0]
            is_norm = module in self.analysis.norms and self._needs_all(module, candidate.factor)
            if is_norm and not self._is_gated_norm(module):
                try:
                    check_rms_norm(self.analysis.modules[module], module)
                except ModelError as error:
                    return f"a norm over it in {module}: {error.problems[0].what}"
        return ""

    def _needs_all(self, module: str, factor: Factor) -> bool:
        """Whether an operation of a module needs all of a factor."""
        return any(mix.module == module and factor in leaves(mix.dim) for mix in self.analysis.record.mixes)

    def _is_uneven(self, candidate: ShardableFactor) -> bool:
        """Whether tp does not divide the units of a factor, and several ranks may not store the same one."""
        size = candidate.factor.size
        fewest = min(self._count(candidate, part) for part in self._parts(candidate))
        return bool(size % self.tp if size >= self.tp else fewest % self.tp and not self._may_share_units(candidate))

    def _may_share_units(self, candidate: ShardableFactor) -> bool:
        """Whether a rank may have a part of the units that share one of a factor, as query heads do a key/value head:
        nothing mixes them."""
        parts = self._parts(candidate)
        counts = {self._count(candidate, part) for part in parts}
        # so that it is proven
        known = candidate.factor.size in self.fields.values() if self.fields else candidate.factor.size < self.tp
        if len(counts) == 1 or candidate.factor.size not in counts or not known:
            return False
        repeats = {factor for part in parts for factor in part[1:] if factor in self.analysis.repeats}
        mixes = (mix for mix in self.analysis.record.mixes if not self._is_gated_norm(mix.module))
        # q, k and v of a group
        packed = {factor for part in parts for factor in part[1:] if factor in self.analysis.parts}
        return not packed and not any(repeats & set(leaves(mix.dim)) for mix in mixes)

    def _share_inputs(self) -> None:
        """Blocks that convert their input for all that is in them, and what is full in them."""
        calls = {call.module: call for call in self.analysis.record.calls}
        sharded = [candidate for candidate in self.choice.candidates if candidate.linears <= self.draft.styles.keys()]
        blocks = {each.block: with_argument("gather", calls[each.block]) for each in sharded if each.block}
        blocks |= blocks_that_read_shards(self.analysis.modules, self.draft.styles, calls)
        for block, style in blocks.items():
            self.draft.styles |= partial_inside(self.analysis.record, block, self.analysis.modules, self.draft.styles)
            self.draft.styles[block] = style

    def _beside_shards(self) -> Iterator[str]:
        """Modules with parameters of which a plan has to say that each rank has all of their gradient: they might work
        on features, and stand beside linears that are sharded. Where some of their parameters are sharded by
        themselves, the others."""
        styles = self.draft.styles
        parents = [
            {name.rpartition(".")[0] for name, style in styles.items() if style.startswith(word)}
            for word in _PROJECTIONS
        ]
        for name, facts in describe(self.model).modules.items():
            is_beside = all(name.rpartition(".")[0] in each for each in parents)
            if name and is_beside and facts.shapes and facts.kind == "other" and name not in styles:
                own = [f"{name}.{key}" for key in facts.shapes]
                others = [parameter for parameter in own if parameter not in styles]
                yield from others if len(others) < len(own) else [name]


def _name_of_size(source: str) -> str:
    """The last part of a field's name; `heads` for heads, and `heads_2` for those of stage 2, of a field that lists
    stages."""
    last = source.rpartition(".")[2]
    if "head" not in source:
        return last
    word = "kv_heads" if "key_value" in source or "kv" in source else "heads"
    return f"{word}_{last}" if last.isdigit() else word


def _call(word: str, argument: str) -> str:
    return f"{word}({argument})" if argument else word


def _run_of(flat: list[Factor], value: int) -> tuple[Factor, ...] | None:
    """The neighboring factors of a dim whose product is a value, those that begin first; None: there are none."""
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 1):
            if size_of(flat[start:stop]) == value:
                return tuple(flat[start:stop])
    return None
