"""Which modules of a plan, or of a dict of PyTorch's styles, return shards: what the watch of first forwards begins with."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

from torch.distributed.tensor import Shard

from parallelize.axes.tensor.torch_styles.linear import RowwiseParallel
from parallelize.axes.tensor.torch_styles.shard_misuse import linears_of
from parallelize.axes.tensor.watch.first_forward import FirstForwards, ShardMaker
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.later_changes import when_changed
from parallelize.state.records import mark_applied

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
    opaque |= {model.aliases[item.fqn] for item in resolved.plan.kept if item.fqn in model.aliases and item.fqn}
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
    for item in resolved.plan.kept:
        style = item.style
        if isinstance(style, RowwiseParallel) and style.use_local_output and style.output_layouts == (Shard(1),):
            yield model.aliases.get(item.fqn, item.fqn), ShardMaker("sequence", 1)


def _features(resolved: ResolvedPlan, column: str) -> ShardMaker | None:
    """The shard that a column linear returns; None where its parts have several sizes, of which nothing is followed."""
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
