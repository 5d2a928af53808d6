"""Gives every planned module what it runs with: slots for its parameters, edges, local attributes, the region."""

from __future__ import annotations

from functools import partial

from torch import nn

from parallelize.errors import ModelError, Problem
from parallelize.forwards import (
    Planned,
    argument_of,
    install,
    overlap,
    overlapped_column,
    overlapped_row,
    reads_shared,
    shares_input,
)
from parallelize.fuse_loss import DEFERRED, deferred_head, mark_deferred
from parallelize.gradients import Debt, Ledger
from parallelize.groups import Group, group_for
from parallelize.local_config import LocalConfig
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary import Vocabulary
from parallelize.overlap import Overlap, RowSite, SharedInput, SiteRow
from parallelize.parameters import Slot
from parallelize.plan.model import ModelFacts
from parallelize.plan.resolve import ModuleRow, ResolvedPlan
from parallelize.region import Region
from parallelize.sharded_logits import mark
from parallelize.sharding import shared_of
from parallelize.special import sharded_rms_norm, vocabulary_embedding
from parallelize.styles.contract import Edge
from parallelize.ulysses_attention import ulysses_attention


class Installer:
    """Gives every planned module its slots, edges and local attributes."""

    def __init__(
        self,
        group: Group,
        model: ModelFacts,
        resolved: ResolvedPlan,
        ledger: Ledger,
        sites: tuple[SiteRow, ...] = (),
    ):
        self.group, self.model, self.resolved, self.ledger, self.sites = group, model, resolved, ledger, sites
        self.overlap = Overlap()
        self.region = Region(group)
        self.orders = {fqn: order for order, fqn in enumerate(resolved.parameters)}
        self.sharers: dict[tuple[int, ...], Group] = {}

    def run(self) -> None:
        for fqn, facts in self.model.modules.items():
            row = self.resolved.modules.get(fqn)
            slots = tuple(self._slot(fqn, key) for key in facts.shapes)
            if slots or row is not None:
                self._install(self.model.objects[fqn], slots, row)
            self._localise(fqn)
        for site in self.sites:
            self._overlap(site)
        if self.resolved.region is not None:
            self._bound_region()
        if self.group.size > 1 and hasattr(self.model.root, "config"):
            self.model.root.register_forward_pre_hook(refuse_attentions, with_kwargs=True)

    # -- parameters -----------------------------------------------------------------------------------------------

    def _slot(self, fqn: str, key: str) -> Slot:
        owner = self.model.owners[f"{fqn}.{key}" if fqn else key]
        row = self.resolved.parameters[owner]
        rank, layout = self.group.rank, row.layout
        valid = None
        if not layout.is_canonical and layout.local_size(rank) != layout.stored_local_size:
            assert layout.dim is not None
            valid = (layout.dim, layout.local_size(rank))
        slot = Slot(key, valid, self._debt(owner), self.ledger, shared_of(layout, rank))
        if slot.debt is not None:  # so that a graph compiled before the first forward finds the leaf
            slot.local(self.model.objects[fqn]._parameters)
        return slot

    def _debt(self, owner: str) -> Debt | None:
        row = self.resolved.parameters[owner]
        if self.group.size == 1:
            return None
        if row.partial:
            return Debt(self.orders[owner], ((self.group, None, 0, 0),))
        shared = row.layout.shared(self.group.rank)
        parts = tuple((self._sharers(ranks), row.layout.dim, start, stop) for start, stop, ranks in shared)
        return Debt(self.orders[owner], parts) if parts else None

    def _sharers(self, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == self.group.size:
            return self.group
        if ranks not in self.sharers:
            self.sharers[ranks] = Group(group_for([self.group.ranks[rank] for rank in ranks]))
        return self.sharers[ranks]

    # -- forwards -------------------------------------------------------------------------------------------------

    def _install(self, module: nn.Module, slots: tuple[Slot, ...], row: ModuleRow | None) -> None:
        planned = Planned(slots, module.__dict__.get("forward"))
        forward = None
        if row is not None:
            contract = row.contract
            if contract.enter is not Edge.NONE:
                planned.argument = argument_of(module, contract.argument)
            planned.enter = self._edge(contract.enter, row, fused=False)
            planned.leave = self._edge(contract.leave, row, fused=type(module) is nn.Linear)
            planned.hide_bias = contract.compute == "rowwise" and planned.leave is not None
            if contract.compute == "embedding" and self.group.size > 1:
                forward = vocabulary_embedding(module, self.group)
            elif contract.compute == DEFERRED:
                planned.leave = None
                vocabulary = Vocabulary(self._width(row), self.group)
                forward = deferred_head(vocabulary, self.resolved.plan.loss_parallel)
                mark_deferred(module)
            elif contract.compute == "ulysses" and self.group.size > 1:
                forward = ulysses_attention(module, self.region, contract.split)
            elif contract.compute == "rms_norm" and self.group.size > 1:
                forward = sharded_rms_norm(self.group)
        install(module, planned, forward)

    def _edge(self, edge: Edge, row: ModuleRow, fused: bool):
        """The op of an edge, bound to its group; None where there is nothing to do."""
        group, dim = self.group, row.contract.sequence_dim
        if edge is Edge.VOCABULARY:
            return partial(mark, vocabulary=Vocabulary(self._width(row), group))
        if edge is Edge.NONE or group.size == 1:
            return None
        bound = {
            Edge.COPY: lambda: partial(ops.copy, group=group),
            Edge.REDUCE: lambda: partial(ops.reduce_owned if fused else ops.reduce, group=group),
            Edge.GATHER_SEQUENCE: lambda: partial(self.region.gather, dim=dim),
            Edge.SCATTER_SEQUENCE: lambda: partial(self.region.scatter, dim=dim),
            Edge.GATHER_LAST: lambda: partial(
                ops.gather, group=group, dim=-1, full=self._width(row), gradient="replicate"
            ),
            Edge.SPLIT_LAST: lambda: partial(ops.split, group=group, dim=-1),
        }
        return bound[edge]()

    def _width(self, row: ModuleRow) -> int:
        """The full output width of a column linear or embedding."""
        layout = self.resolved.parameters[self.model.owners[f"{row.fqn}.weight"]].layout
        assert layout.dim is not None
        return layout.shape[layout.dim]

    def _overlap(self, row: SiteRow) -> None:
        """Let a site run the linears that it is about, over the forwards that they have."""
        module, contract = self.model.objects[row.fqn], self.resolved.modules[row.fqn].contract
        site = self.overlap.site(row, self.group)
        by_rows = row.op in ("all_gather_linear", "linear_reduce_scatter")
        region = self.region if by_rows else None
        if not row.consumers:
            transposed = hasattr(module, "nf")
            features = self._most(f"{row.fqn}.weight")
            features = (features[0], features[1]) if transposed else (features[1], features[0])
            overlap(module, overlapped_row, RowSite(site, region, contract.sequence_dim, transposed, features))
            return
        linears = [self.model.objects[fqn] for fqn in row.consumers]
        widths = [self._local_width(fqn) for fqn in row.consumers]
        most = [max(self._most(f"{fqn}.weight")[self._out_dim(fqn)], 1) for fqn in row.consumers]
        shared = SharedInput(site, region, contract.sequence_dim, linears, widths, most)
        if row.consumers == (row.fqn,):
            overlap(module, overlapped_column, shared)
            return
        overlap(module, shares_input, shared)
        module.__dict__["_planned"].enter = shared.enter
        for place, linear in enumerate(linears):
            overlap(linear, reads_shared, shared, place)

    def _most(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter on the rank that has most of it."""
        layout = self.resolved.parameters[self.model.owners[name]].layout
        return max(layout.local_shape(rank) for rank in range(self.group.size))

    def _out_dim(self, fqn: str) -> int:
        return 1 if hasattr(self.model.objects[fqn], "nf") else 0

    def _local_width(self, fqn: str) -> int:
        """Output features of a column linear on this rank."""
        layout = self.resolved.parameters[self.model.owners[f"{fqn}.weight"]].layout
        assert layout.dim is not None
        return layout.local_shape(self.group.rank)[layout.dim]

    # -- attributes and region ------------------------------------------------------------------------------------

    def _localise(self, fqn: str) -> None:
        module = self.model.objects[fqn]
        wanted = dict(self.resolved.attributes.get(fqn, {}))
        row = self.resolved.modules.get(fqn)
        for attribute, key in (row.contract.local_attributes if row else {}).items():
            layout = self.resolved.parameters[self.model.owners[f"{fqn}.{key}"]].layout
            wanted[attribute] = layout.local_size(self.group.rank)
        on_config = {key.partition(".")[2]: value for key, value in wanted.items() if key.startswith("config.")}
        if on_config:
            module.config = LocalConfig(module.config, on_config)
        for attribute, value in wanted.items():
            if not attribute.startswith("config."):
                setattr(module, attribute, value)

    def _bound_region(self) -> None:
        """Shard hidden states where the region begins, gather them where it ends."""
        region = self.resolved.region
        assert region is not None
        if self.group.size == 1:
            return
        objects = (
            self.model.objects
        )  # of this pipeline stage: others enter and leave the region where it has no end here
        if region.enter in objects:
            first = objects[region.enter]
            entry = self._planned(first)
            entry.argument = argument_of(first, region.argument)
            entry.enter = self.region.enter
            install(first, entry)
        if region.leave in objects:
            exit_ = self._planned(objects[region.leave])
            exit_.leave = self.region.leave
            install(objects[region.leave], exit_)
        holder = region.enter.rpartition(".")[0].rpartition(".")[0]
        objects[holder].register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)

    def _planned(self, module: nn.Module) -> Planned:
        if "_planned" not in module.__dict__:
            return Planned((), module.__dict__.get("forward"))
        return module.__dict__["_planned"]


def _refuse_hidden_states(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Hidden states recorded inside the region would be shards that look like whole ones."""
    if _wants(module, kwargs, "output_hidden_states"):
        raise ModelError(
            Problem(
                "hidden-states-are-shards",
                "output_hidden_states under sequence parallelism would return sequence shards",
                fix="apply the plan with sequence_parallel=False to look at hidden states",
            )
        )


def refuse_attentions(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Recorded attention weights would be those of this rank's heads alone."""
    if _wants(module, kwargs, "output_attentions"):
        raise ModelError(
            Problem(
                "attentions-are-shards",
                "output_attentions would return the weights of this rank's heads alone",
                fix="look at attention weights on a model without a plan",
            )
        )


def _wants(module: nn.Module, kwargs: dict, name: str) -> bool:
    wanted = kwargs.get(name)
    return bool(getattr(getattr(module, "config", None), name, False) if wanted is None else wanted)
