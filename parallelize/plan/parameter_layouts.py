"""From a parameter's use to its layout: reads the plan's sizes from the model, divides them, refuses what does not fit.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from parallelize.base.errors import Problem
from parallelize.base.layout import Chunk, Layout, chunked, local_units, of_packs, packed, repeated, replicated, tiled
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.expert_order import on_ranks, order_of
from parallelize.plan.model_facts import ModelFacts, ParameterFacts
from parallelize.plan.pattern import generic
from parallelize.plan.schema import Plan, Rule
from parallelize.plan.styles.contract import Use
from parallelize.plan.styles.style import REST

HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size")


class LayoutMaker:
    """Makes layouts over `tp_size` ranks, with the plan's sizes as the model has them."""

    def __init__(self, plan: Plan, model: ModelFacts, tp_size: int):
        self.plan, self.model, self.tp_size = plan, model, tp_size

    def size(self, name: str) -> int | None:
        """The value of a size, or None where the model does not have it."""
        source = self.plan.sizes[name].source
        if isinstance(source, int):
            return source
        for source_object in (self.model.config, self.model.root):
            value = dotted(source_object, source)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def local_size(self, name: str) -> int | None:
        """The number of units of a size that one rank stores, or None where tp does not divide it."""
        full = self.size(name)
        return None if full is None else local_units(full, self.tp_size, self.plan.sizes[name].replicate_below_tp)

    def axis(self, use: Use) -> str:
        """The axis that a layout is over: `ep` where experts are divided over more ranks than those of `tp`."""
        return "ep" if use.by_expert and self.plan.options.expert_ranks > self.tp_size else "tp"

    def divides_adapters(self) -> bool:
        """Whether adapters are divided as whole experts are. Folded experts are units of ZeRO 3 by themselves, without
        their adapters."""
        options = self.plan.options
        folds = options.expert_ranks > self.tp_size
        return options.ep > 1 and options.etp == 1 and not (folds and options.zero == 3)

    def layout(self, fact: ParameterFacts, use: Use, rule: Rule) -> tuple[Layout | None, Problem | None]:
        """(the layout, None), or (None, the reason why there is none)."""
        if use.dim is None:
            return replicated(fact.shape, self.tp_size), None
        if fact.block > 1 and use.dim == len(fact.shape) - 1:
            return self._layout_of_blocks(fact, use, rule)
        if use.by_expert:
            return self._layout_of_experts(fact, use, use.dim, rule)
        if use.dim >= len(fact.shape):
            what = f"{generic(fact.fqn)} has shape {list(fact.shape)}, no dim {use.dim}"
            return None, Problem("bad-dim", what, rule.where)
        if not use.unit and use.chunks == use.adjacent == 1:
            layout = chunked(fact.shape, use.dim, self.tp_size)
            return layout, self._split_heads(fact, layout, rule) if self.plan.on_unclaimed != "leave" else None
        chunks, problem = self._chunks(fact, use, rule)
        return (None, problem) if problem else (packed(fact.shape, use.dim, self.tp_size, chunks), None)

    def _layout_of_blocks(self, fact: ParameterFacts, use: Use, rule: Rule) -> tuple[Layout | None, Problem | None]:
        """Codes or scales, split where the weight that they stand for is split."""
        weight = replace(fact, shape=(*fact.shape[:-1], fact.shape[-1] * fact.packs), packs=1, block=1)
        layout, problem = self.layout(weight, use, rule)
        if layout is None:
            return None, problem
        bounds = [bound for owned in layout.owned for interval in owned for bound in interval]
        split = next((bound for bound in bounds if bound % fact.block), None)
        if split is not None:
            return None, self._split_block(weight, fact.block, split, rule)
        return of_packs(layout, fact.packs), None

    def _split_block(self, weight: ParameterFacts, block: int, bound: int, rule: Rule) -> Problem:
        width, name = weight.shape[-1], generic(weight.fqn.rpartition(".")[0])
        sizes = ", ".join(str(n) for n in range(1, self.tp_size) if width // block % n == 0)
        return Problem(
            "split-block",
            f"`{rule.style}` would split a block of {block} elements that are quantized together",
            rule.where,
            (
                ("module", f"{name}: {width} input features over axis tp (size {self.tp_size})"),
                ("split at", f"element {bound}: {bound} % {block} = {bound % block}"),
            ),
            f"a smaller block: quantize(model, 'nf4(block=32)'), import_quantized(model, block=32); tp size {sizes}; "
            f"or leave {name} out of `modules`",
        )

    def _layout_of_experts(
        self, fact: ParameterFacts, use: Use, dim: int, rule: Rule
    ) -> tuple[Layout | None, Problem | None]:
        """Whole experts along their dim, or, where `dim` is another one, experts of which each is split along it."""
        options = self.plan.options
        num_ranks = max(self.tp_size, options.expert_ranks)
        if dim == use.expert_dim:
            unit = fact.shape[0] // use.chunks if dim == 0 and use.chunks > 1 else 1
            order = order_of(options.expert_placement, fact.fqn)
            units = on_ranks(order, options.ep) if order is not None else None
            return repeated(fact.shape, dim, num_ranks, options.ep, unit, 1 if dim == 0 else use.chunks, units), None
        parts, width = use.chunks * use.adjacent, fact.shape[dim]
        if width % (parts * options.etp):
            what = f"dim {dim} of {generic(fact.fqn)} is {width}, which etp {options.etp} does not divide"
            rows = (("weight", f"{list(fact.shape)}, of which {parts} x {options.etp} must divide dim {dim}"),)
            return None, Problem("bad-ep", what, rule.where, rows, "a smaller etp")
        chunks = [Chunk(width // use.chunks, adjacent=use.adjacent)] * use.chunks
        return tiled(packed(fact.shape, dim, options.etp, chunks), num_ranks, options.ep), None

    def _chunks(self, fact: ParameterFacts, use: Use, rule: Rule) -> tuple[list[Chunk], Problem | None]:
        assert use.dim is not None
        width = fact.shape[use.dim]
        if not use.unit:
            if width % (parts := use.chunks * use.adjacent):
                return [], self._indivisible(fact, use, rule, parts, "chunks")
            return [Chunk(width // use.chunks, adjacent=use.adjacent)] * use.chunks, None
        parts = 0 if REST in self.plan.sizes else use.unit.count(REST)
        named = self._without_rest(use) if parts else use
        counts, problem = self._counts(fact, named, rule)
        if problem is not None:
            return [], problem
        units, left, problem = self._unit_widths(fact, named, rule, counts)
        if problem is not None:
            return [], problem
        if left % parts if parts else left:
            return [], self._other_width(fact, use, rule, width - use.chunks * left)
        chunks = [
            Chunk(count * unit, count, self.plan.sizes[name].replicate_below_tp, name)
            for name, count, unit in zip(named.unit, counts, units, strict=True)
        ]
        if parts:  # of which any element may be a boundary
            chunks = [Chunk(left // parts) if name == REST else chunks.pop(0) for name in use.unit]
        return chunks * use.chunks, None

    def _without_rest(self, use: Use) -> Use:
        """The use without the chunks that divide what the others leave; all of these have a width."""
        widths = use.widths or ("",) * len(use.unit)
        terms = [(name, width or "1") for name, width in zip(use.unit, widths, strict=True) if name != REST]
        return replace(use, unit=tuple(name for name, _ in terms), widths=tuple(width for _, width in terms))

    def _counts(self, fact: ParameterFacts, use: Use, rule: Rule) -> tuple[list[int], Problem | None]:
        """The number of units of each size in one chunk."""
        counts = []
        for name in use.unit:
            count = self.size(name)
            if count is None:
                return [], _no_size(self.plan, name, rule)
            part, replicable = count // use.chunks, self.plan.sizes[name].replicate_below_tp
            if count % use.chunks or local_units(part, self.tp_size, replicable) is None:
                return [], self._uneven(fact, use, rule, name, count)
            counts.append(part)
        return counts, None

    def _unit_widths(
        self, fact: ParameterFacts, use: Use, rule: Rule, counts: list[int]
    ) -> tuple[list[int], int, Problem | None]:
        """The width of the units of each size: as the rule names it, or the same of all; and how many elements of each
        of the use's chunks they leave."""
        assert use.dim is not None
        width = fact.shape[use.dim]
        if use.widths or not use.unit:
            missing = next((name for name in use.widths if self.width(name) is None), None)
            if missing is not None:
                return [], 0, _no_size(self.plan, missing, rule)
            units = [self.width(name) or 1 for name in use.widths]
            planned = use.chunks * sum(count * unit for count, unit in zip(counts, units, strict=True))
            is_too_small = planned > width or (width - planned) % use.chunks
            return (
                units,
                (width - planned) // use.chunks,
                self._other_width(fact, use, rule, planned) if is_too_small else None,
            )
        parts = use.chunks * sum(counts)
        if width % parts:
            return [], 0, self._indivisible(fact, use, rule, parts, " + ".join(use.unit))
        head = self._head_width(fact)
        unit = width // parts
        if head is not None and width % head == 0 and unit % head:
            return [], 0, self._split_units(fact, use, rule, unit, head)
        return [unit] * len(counts), 0, None

    def width(self, text: str) -> int | None:
        """The width of a unit: a number, a size of the plan, or 1 where a rule names none beside others that have
        one."""
        return int(text or 1) if text.isdigit() or not text else self.size(text)

    def _other_width(self, fact: ParameterFacts, use: Use, rule: Rule, planned: int) -> Problem:
        assert use.dim is not None
        what = (
            f"dim {use.dim} of {generic(fact.fqn)} is {fact.shape[use.dim]}, and the chunks of the rule are {planned} "
            "together"
        )
        sizes = dict.fromkeys(name for name in (*use.unit, *use.widths) if name in self.plan.sizes)
        rows = tuple((name, str(self.size(name))) for name in sizes)
        return Problem("indivisible-units", what, rule.where, rows, "check the sizes that the rule names")

    def _uneven(self, fact: ParameterFacts, use: Use, rule: Rule, name: str, count: int) -> Problem:
        replicable = self.plan.sizes[name].replicate_below_tp
        part = count // use.chunks
        valid_sizes = [size for size in range(1, part + 1) if local_units(part, size, replicable) is not None]
        if count % use.chunks:
            valid_sizes = [1]
        more = f", or a multiple of {count}" if replicable else ""
        return Problem(
            "uneven-heads",
            f"`{rule.style}` cannot split these {name}",
            rule.where,
            (
                ("module", generic(fact.fqn.rpartition(".")[0])),
                (
                    name,
                    _remainder(count, use.chunks, self.tp_size),
                ),
            ),
            f"use tp size {', '.join(map(str, valid_sizes))}{more}; or check where `sizes` reads {name} from",
        )

    def _indivisible(self, fact: ParameterFacts, use: Use, rule: Rule, parts: int, name: str) -> Problem:
        assert use.dim is not None
        width = fact.shape[use.dim]
        return Problem(
            "indivisible-units",
            f"dim {use.dim} of {generic(fact.fqn)} is not a multiple of {name}",
            rule.where,
            (("weight", f"{list(fact.shape)}: {width} % {parts} = {width % parts}"),),
            "check the sizes that the rule names",
        )

    def _head_width(self, fact: ParameterFacts) -> int | None:
        """The head width of the attention module that has the parameter, or that contains its linear, or of a group of
        channels; or None."""
        owner = fact.fqn.rpartition(".")[0]
        facts = self.model.modules.get(owner)
        groups = {"grouped": "groups", "channel_norm": "num_groups"}.get(facts.kind, "") if facts is not None else ""
        # the channels of a group stay together
        if count := getattr(self.model.objects[owner], groups, None) if groups else None:
            return fact.shape[0] // int(count)
        for name in filter(None, (owner, owner.rpartition(".")[0])):
            module = self.model.objects.get(self.model.module_fqns.get(name, name))
            for key in HEAD_WIDTHS:
                if isinstance(width := getattr(module, key, None), int) and width > 0:
                    return width
        return None

    def _split_units(self, fact: ParameterFacts, use: Use, rule: Rule, unit: int, head: int) -> Problem:
        """The problem where a size alone does not say whether a rule counts heads, or something of another width for
        each head."""
        assert use.dim is not None
        width, sizes = fact.shape[use.dim], " + ".join(use.unit)
        what = (
            f"`{rule.style}` of {generic(fact.fqn)} does not say what its {width} elements are: {sizes} of {unit}, or "
            f"{width // head} heads of {head}"
        )
        return Problem(
            "uneven-heads",
            what,
            rule.where,
            fix=(
                f"name the width of each chunk: `{use.unit[0]}*{unit}` for {unit} for each of {use.unit[0]}; or the "
                "size that counts its heads"
            ),
        )

    def _split_heads(self, fact: ParameterFacts, layout: Layout, rule: Rule) -> Problem | None:
        """The problem where a rule without a unit would split a head of the attention that contains the linear."""
        width = self._head_width(fact)
        if width is None or layout.dim is None or fact.shape[layout.dim] % width:
            return None
        if all(stop % width == 0 for owned in layout.owned for _, stop in owned):
            return None
        heads = fact.shape[layout.dim] // width
        return Problem(
            "uneven-heads",
            f"`{rule.style}` would split a head",
            rule.where,
            (
                ("module", generic(fact.fqn.rpartition(".")[0])),
                ("heads", f"{heads} of width {width} over axis tp (size {self.tp_size})"),
            ),
            f"use a tp size that divides {heads}, or a plan whose rule names the heads: `colwise(kv_heads)`",
        )


def _no_size(plan: Plan, name: str, rule: Rule) -> Problem:
    source = plan.sizes[name].source
    return Problem(
        "missing-size",
        f"size {name} is read from {source!r}, which this model's config does not have",
        plan.sizes[name].where or rule.where,
        fix=f"write the number itself, or the config field that has it: `sizes: {{{name}: ...}}`",
    )


def _remainder(count: int, chunks: int, tp_size: int) -> str:
    in_chunks = f" in {chunks} chunks" if chunks > 1 else ""
    parts = f"{chunks} x {tp_size}" if chunks > 1 else str(tp_size)
    return f"{count}{in_chunks} over axis tp (size {tp_size}): {count} % {parts} = {count % (chunks * tp_size)}"
