"""Refuses blocks whose own code computes something else on shards of features than on all of them.

The code between the column and the row linears of a block sees one range of features on each rank. Cutting it into
parts, or normalizing it, gives other numbers than for all features; a parameter that reads it gets a part of its
gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from parallelize.axes.tensor.torch_styles.styles import ColwiseParallel, RowwiseParallel
from parallelize.axes.tensor.watch.first_forward import FirstForwards, ShardMaker
from parallelize.axes.tensor.watch.shard_reads import ShardReads, shard_reads
from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.plan.adapters import BASE, layer_name
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.later_changes import when_changed
from parallelize.state.records import mark_applied

_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class _Block:
    """A module with column and row linears among its children, and what its code does between them."""

    fqn: str
    reads: ShardReads

    def child(self, name: str) -> str:
        return f"{self.fqn}.{name}" if self.fqn else name


def misused_shards(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Problems for code that is certain to compute something else on the shards of this plan."""
    for block in _blocks(resolved, model):
        for name in sorted(block.reads.divided):
            if not _is_packed(resolved, block.child(name)):
                yield _divided(block.child(name), block.fqn)
        for name, function in sorted(block.reads.mixed):
            what = (
                f"{generic(block.fqn) or 'the model'} calls {function} over all features of {name}, and a rank has a "
                "part"
            )
            fix = "`replicate` for the linears of this block, or put the function after its row linear"
            yield Problem("mixed-features", what, fix=fix)
        for name in _unclear(resolved, model, block):
            what = f"{generic(name)} reads the shards of {generic(block.fqn)}: what is its gradient on each rank?"
            fix = (
                "`replicate(gradient=partial)` if a rank uses it on its own features, `replicate(gradient=full)` if not"
            )
            yield Problem("unclear-gradient", what, fix=fix)


def refuse_training_of_unclaimed(resolved: ResolvedPlan, model: ModelFacts) -> None:
    """Refuse the training of parameters that no style of a dict names, and that read shards of features.

    Their values are right on every rank, so that such a dict serves for inference; their gradients are parts of a sum.
    """
    if resolved.plan.on_unclaimed != "leave":
        return
    for block in _blocks(resolved, model):
        names = _readers(resolved, model, block)
        parameters = {name: model.root.get_parameter(name) for name in names}
        if parameters:
            model.objects[block.fqn].register_forward_pre_hook(partial(_refuse_training, parameters))


def _refuse_training(parameters: dict[str, Any], module: nn.Module, _: Any) -> None:
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if names and module.training and torch.is_grad_enabled():
        what = f"no style names {short_list(names, 3)}, between shards, where each rank has a part of the gradient"
        fix = "a plan with `replicate(gradient=partial)` for it; or freeze it: requires_grad_(False)"
        raise ModelError(Problem("unclaimed-between-shards", what, fix=fix))


def _divided(column: str, block: str) -> Problem:
    what = (
        f"{generic(block) or 'the model'} cuts the output of {generic(column)} into parts, and a rank has a range of "
        "all of it"
    )
    fix = "a plan whose rule shards each part: `colwise(chunks=2)`, or `colwise(heads + kv_heads + kv_heads)`"
    return Problem("divided-features", what, fix=fix)


def _blocks(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[_Block]:
    if resolved.mesh.ranks("tp") == 1:
        return
    columns, rows = map(_linears_by_parent, linears_of(resolved, model))
    for fqn, children in columns.items():
        block = model.objects.get(fqn)
        if block is None or "forward" in block.__dict__:
            continue
        names, summed = frozenset(children), frozenset(rows.get(fqn, ()))
        elementwise = frozenset(key for key, child in block.named_children() if type(child) in _ELEMENTWISE)
        if names and summed:
            cls: Any = type(block)
            in_order = isinstance(block, nn.Sequential) and cls.forward is nn.Sequential.forward
            reads = (
                shard_reads(cls, names, summed, elementwise)
                if not in_order
                else _readers_in_sequential(block, names, summed)
            )
            yield _Block(fqn, reads)


def _readers_in_sequential(block: nn.Module, columns: frozenset[str], rows: frozenset[str]) -> ShardReads:
    """Of an `nn.Sequential`, whose children are called one after another: those between a column and a row linear."""
    readers, is_shard = set(), False
    for name, _ in block.named_children():
        if name in columns or name in rows:
            is_shard = name in columns
        elif is_shard:
            readers.add(name)
    return ShardReads(frozenset(readers))


def _linears_by_parent(names: list[str]) -> dict[str, list[str]]:
    """Names of modules -> the last parts of the names of linears in them."""
    children: dict[str, list[str]] = {}
    for name in map(layer_name, names):
        parent, _, key = name.rpartition(".")
        children.setdefault(parent, []).append(key)
    return children


def linears_of(resolved: ResolvedPlan, model: ModelFacts) -> tuple[list[str], list[str]]:
    """(linears that return a plain shard of features, linears that sum over the ranks)."""
    columns, rows = [], []
    for name, row in resolved.modules.items():
        contract, is_linear = row.contract, model.modules[name].kind in ("linear", "conv1d")
        if contract.traits.splits_output and is_linear and contract.leave is Conversion.NONE:
            columns += [] if contract.returns_dtensor or contract.defers_logits else [name]
        elif contract.traits.sums_output:
            rows.append(name)
    for item in resolved.plan.unlowered_styles:
        name, style = model.module_fqns.get(item.fqn, ""), item.style
        if name in model.modules and isinstance(style, RowwiseParallel):
            rows.append(name)
        elif name in model.modules and isinstance(style, ColwiseParallel) and style.use_local_output:
            is_linear = model.modules[name].kind in ("linear", "conv1d")
            columns += [name] if is_linear and style.output_layouts == (Shard(-1),) else []
    return columns, rows


def _is_packed(resolved: ResolvedPlan, column: str) -> bool:
    """Whether the rule of a column linear shards its parts, each by itself."""
    row = resolved.modules.get(f"{column}.{BASE}") or resolved.modules.get(column)
    return row is not None and (row.rule.style.chunks > 1 or len(row.rule.style.unit) > 1)


def _readers(resolved: ResolvedPlan, model: ModelFacts, block: _Block) -> list[str]:
    """The parameters that read the shards of a block and that are full on each rank. The bias of a row linear is added
    to the sum."""
    styled = {item.fqn for item in resolved.plan.unlowered_styles}
    names = []
    for name in _parameters_in(block, model):
        row = resolved.parameters.get(name)  # None under the second name of a tied parameter
        owner = name.rpartition(".")[0]
        owner_row = resolved.modules.get(owner)
        is_summed = owner_row is not None and owner_row.contract.traits.sums_output
        if row and row.layout.dim is None and not row.partial and owner not in styled and not is_summed:
            names.append(name)
    return names


def _parameters_in(block: _Block, model: ModelFacts) -> Iterator[str]:
    """The names of those that the block, or a module that it calls, reads shards with."""
    for name in map(block.child, sorted(block.reads.readers)):
        reader = model.objects.get(name)
        if reader is None:
            yield name
        else:
            yield from (key for key, _ in reader.named_parameters(prefix=name, remove_duplicate=False))


def _unclear(resolved: ResolvedPlan, model: ModelFacts, block: _Block) -> list[str]:
    """Those of them that a plan replicates without a word on their gradient."""
    if resolved.plan.on_unclaimed == "leave":
        return []
    rows = resolved.parameters
    return [
        name
        for name in _readers(resolved, model, block)
        if rows[name].fact.requires_grad and "gradient" not in rows[name].rule.style.options
    ]


# -- watched forwards ------------------------------------------------------------------------------------------------
# Which modules of a plan, or of a dict of PyTorch's styles, return shards: what the watch of first forwards begins
# with.


_MAKE_TOKENS = (Conversion.SCATTER_SEQUENCE, Conversion.ENTER_REGION)  # of a module's output: a sequence shard


def watch_first_forwards(resolved: ResolvedPlan, model: ModelFacts) -> None:
    """Watch the first forwards of a model, and of those of its modules that may be called without it."""
    if resolved.mesh.ranks("tp") == 1:
        return
    makers = dict(_makers(resolved, model))
    entries = tuple(region.enter for region in resolved.regions)
    if not makers and not entries:
        return
    opaque = {name for name, row in resolved.modules.items() if row.contract.decides_inside}
    # a linear in float8 scales by the largest value that this rank has
    opaque |= {name for name in resolved.modules if is_float8_linear(model.objects[name])}
    opaque |= {
        model.module_fqns[item.fqn]
        for item in resolved.plan.unlowered_styles
        if item.fqn in model.module_fqns and item.fqn
    }
    first = FirstForwards(makers, frozenset(opaque), entries)
    for name in {*makers, *opaque, *entries} & model.objects.keys():
        mark_applied(model.objects[name], name=name)
    for name in _watched(makers, entries):
        if name in model.objects:
            first.install(model.objects[name], name)
    when_changed(model.objects[""], partial(first.begin_again, weakref.ref(model.objects[""])))


def _watched(makers: dict[str, ShardMaker], entries: tuple[str, ...]) -> Iterator[str]:
    """The model, its decoder, and the modules with column linears among their children."""
    names = [name.rpartition(".")[0] for name, maker in makers.items() if maker.kind == "features"]
    models = [entry.rpartition(".")[0].rpartition(".")[0] for entry in entries]
    yield from dict.fromkeys(["", *models, *names])


def _makers(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[tuple[str, ShardMaker]]:
    columns, _ = linears_of(resolved, model)
    for name in columns:
        maker = _features(resolved, name)
        if maker is not None:
            yield name, maker
    for name, row in resolved.modules.items():
        if row.contract.leave in _MAKE_TOKENS and row.contract.sequence_dim == 1:
            yield name, ShardMaker("sequence", 1)
    for item in resolved.plan.unlowered_styles:
        style = item.style
        if isinstance(style, RowwiseParallel) and style.use_local_output and style.output_layouts == (Shard(1),):
            yield model.module_fqns.get(item.fqn, item.fqn), ShardMaker("sequence", 1)


def _features(resolved: ResolvedPlan, column: str) -> ShardMaker | None:
    """The shard that a column linear returns; None where its parts have several sizes: these are not followed."""
    facts = resolved.facts.modules.get(column)
    row = resolved.parameters.get(f"{column}.{facts.weight_key if facts is not None else 'weight'}")
    if row is None or column not in resolved.modules or row.layout.dim is None:
        return ShardMaker("features", -1)
    weight, chunks = row.layout.shape, row.layout.chunks
    if len(weight) > 2:  # a convolution, whose channels come before the positions
        return ShardMaker("features", 1 - len(weight))
    if len({(chunk.size, chunk.units) for chunk in chunks}) > 1:
        return None
    number, ranks = max(len(chunks), 1), row.layout.num_ranks
    units = chunks[0].units if chunks else None
    even = units is not None and units % ranks == 0
    return ShardMaker("features", -1, number, units // ranks if even and units is not None else 0)
