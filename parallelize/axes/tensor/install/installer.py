"""Installs a resolved plan in a model: parameter slots, conversions, local attributes, the sequence-parallel region."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.tensor.dtensor_boundary import (
    SharedConversions,
    input_conversion,
    return_dtensor,
)
from parallelize.axes.tensor.experts.expert_forms import form_of
from parallelize.axes.tensor.experts.expert_parallel import ExpertRanks, num_choices, scaled_experts, whole_experts
from parallelize.axes.tensor.experts.expert_tensor_parallel import allow_any_width, dense_experts, split_experts
from parallelize.axes.tensor.experts.shared_expert_overlap import compute_overlapped
from parallelize.axes.tensor.flex_heads import attention_modules, head_shard, install_heads
from parallelize.axes.tensor.layers.attention_layers import replicated_multihead, sharded_multihead, ulysses_attention
from parallelize.axes.tensor.layers.embedding import vocabulary_embedding
from parallelize.axes.tensor.layers.norms import (
    gather_normalized,
    sharded_channel_norm,
    sharded_gated_norm,
    sharded_rms_norm,
)
from parallelize.axes.tensor.layers.scan import scan_forward
from parallelize.axes.tensor.local_inputs import local_inputs
from parallelize.axes.tensor.overlap_sites import Overlap, PlannedCallSite
from parallelize.axes.tensor.overlapped_forwards import (
    install_overlapped,
    overlapped_block,
    overlapped_column,
    overlapped_consumer,
    overlapped_row,
)
from parallelize.axes.tensor.planned_forward import (
    ModuleRuntime,
    OverlappedRowLinear,
    argument_of,
    install,
    installed,
    reading_children,
)
from parallelize.axes.tensor.recorded_outputs import RecordedHiddenStates, refuse_attentions, refuse_hidden_states
from parallelize.axes.tensor.region import EvenShards, Region
from parallelize.axes.tensor.shared_input import SharedConversion, SharedInput
from parallelize.axes.tensor.sizes_by_tensor import sized, sizes_by_tensor
from parallelize.axes.tensor.watch.child_reads import children_read
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.axes.vocabulary.loss.losses import deferred_head, mark_deferred
from parallelize.base.layout import Layout, of_elements
from parallelize.base.providers import provider
from parallelize.comm.groups import Group, group_for
from parallelize.comm.handshake import InputCheck
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.plan.adapters import BASE
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.block_formats import is_conv1d
from parallelize.plan.expert_order import order_of
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ModuleRow, ParameterRow, RegionRow, ResolvedPlan
from parallelize.plan.styles.contract import Contract, Conversion
from parallelize.plan.styles.style import ModuleFacts
from parallelize.state.forward_steps import PLANNED, add_step
from parallelize.state.local_config import set_local
from parallelize.state.parameters import Slot
from parallelize.state.pending_reductions import PendingReduction, PendingReductions
from parallelize.state.sharding import shared_of

EXPERT_CHUNKS = 4
"""Parts of the tokens of a mixture, of which one travels while another is computed."""


class Installer:
    """Makes every planned module run as planned. The parameters must be sharded already.

    Args:
        tp: the axis `tp`. group: its process group.
        model: the facts of this rank's part of the model; resolved: the plan of that part.
        call_sites: where collectives overlap with matmuls.
        experts: the group of `ep`, where experts are divided over data axes too.
    """

    def __init__(
        self,
        tp: DeviceMesh,
        group: Group,
        model: ModelFacts,
        resolved: ResolvedPlan,
        pending_reductions: PendingReductions,
        call_sites: tuple[PlannedCallSite, ...] = (),
        inputs: InputCheck | None = None,
        experts: Group | None = None,
    ):
        self.experts = experts
        self.tp, self.group, self.model, self.resolved = tp, group, model, resolved
        self.pending_reductions, self.call_sites = pending_reductions, call_sites
        self.inputs = inputs
        self.overlap = Overlap()
        self.region = EvenShards(tp, group) if resolved.plan.on_unclaimed == "leave" else Region(group)
        self.recorded = RecordedHiddenStates(self.region)
        self.orders = {fqn: order for order, fqn in enumerate(resolved.parameters)}
        self.subgroups: dict[tuple[int, ...], Group] = {}
        self.shared_conversions: dict[int | None, SharedConversion] = {}  # by the dim that they gather; None copies
        self.dtensor_conversions: SharedConversions = {}

    def run(self) -> None:
        for fqn, facts in self._innermost_first():
            row = self.resolved.modules.get(fqn)
            slots = tuple(self._slot(fqn, key) for key in facts.shapes if not self._parameter(fqn, key).plain)
            read = children_read(self.resolved, self.model, fqn)
            if slots or row is not None or read:
                self._install(self.model.objects[fqn], slots, row, read)
            self._set_local_attributes(fqn)
        for call_site in self.call_sites:
            self._install_overlap(call_site)
        self._install_heads()
        for row in self.resolved.modules.values():
            if row.contract.beside:
                compute_overlapped(self.model, row)
        for region in self.resolved.regions:
            self._install_region(region)
        if self.group.size > 1 and hasattr(self.model.root, "config"):
            self.model.root.register_forward_pre_hook(refuse_attentions, with_kwargs=True)

    # -- parameters -----------------------------------------------------------------------------------------------

    def _parameter(self, fqn: str, key: str) -> ParameterRow:
        return self.resolved.parameters[self.model.parameter_fqns[f"{fqn}.{key}" if fqn else key]]

    def _slot(self, fqn: str, key: str) -> Slot:
        row = self._parameter(fqn, key)
        rank, layout = self._rank(row), row.layout
        valid = None
        if not layout.is_canonical and layout.local_size(rank) != layout.stored_local_size:
            assert layout.dim is not None
            valid = (layout.dim, layout.local_size(rank))
        tied = len(row.fact.names) > 1
        slot = Slot(key, valid, self._reduction(row), self.pending_reductions, shared_of(layout, rank), tied)
        if slot.reduction is not None:  # so that a graph compiled before the first forward reads the leaf
            slot.local(self.model.objects[fqn]._parameters)
        return slot

    def _rank(self, row: ParameterRow) -> int:
        """This rank's index on the axis that the parameter's layout is over."""
        return self.experts.rank if row.axis == "ep" and self.experts is not None else self.group.rank

    def _reduction(self, row: ParameterRow) -> PendingReduction | None:
        if self.group.size == 1 or row.axis == "ep":
            return None
        if row.partial:
            return PendingReduction(self.orders[row.fqn], ((self.group, None, 0, 0),))
        shared = row.layout.shared(self.group.rank)
        parts = tuple((self._subgroup(ranks), row.layout.dim, start, stop) for start, stop, ranks in shared)
        return PendingReduction(self.orders[row.fqn], parts) if parts else None

    def _subgroup(self, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == self.group.size:
            return self.group
        if ranks not in self.subgroups:
            self.subgroups[ranks] = Group(group_for([self.group.ranks[rank] for rank in ranks]))
        return self.subgroups[ranks]

    # -- forwards -------------------------------------------------------------------------------------------------

    def _install(
        self, module: nn.Module, slots: tuple[Slot, ...], row: ModuleRow | None, read: tuple[str, ...]
    ) -> None:
        """read: children whose full parameters the module's own forward reads."""
        planned = ModuleRuntime(slots)
        forward = _forward_reading_children(module, read)
        if row is not None:
            contract = row.contract
            planned.enter = self._input_conversion(row)
            if planned.enter is not None:
                planned.argument = argument_of(module, contract.argument)
                planned.max_inputs = contract.max_inputs
            widths = () if contract.sizes_by_tensor else contract.input_widths
            planned.inputs = local_inputs(module, contract.inputs, widths, self.group, argument_of)
            if contract.sizes_by_tensor:
                inside = self._planned_inside(row.fqn)
                sizes_by_tensor(module, contract.input_widths, inside, argument_of)
            is_fresh = type(module) is nn.Linear or contract.computes_experts  # an output that nothing else reads
            planned.leave = self._conversion(contract.leave, row, fused=is_fresh)
            planned.defer_bias = contract.adds_bias_after_sum and planned.leave is not None
            planned.bias_group = self.group if contract.dtensors else None
            if contract.returns_dtensor:
                width = self._width(row) if contract.traits.splits_output else None
                return_dtensor(module, planned, contract, self.tp, self.group, width)
            if contract.dtensors and contract.traits.by_token:
                gather_normalized(
                    module, planned, contract.sequence_dim, self.tp, self.group, not contract.returns_dtensor
                )
            if contract.defers_logits:
                planned.leave = None
                mark_deferred(module)
            forward = self._forward(module, row, planned, read)
        install(module, planned, forward)

    def _forward(
        self, module: nn.Module, row: ModuleRow, planned: ModuleRuntime, read: tuple[str, ...]
    ) -> Callable | None:
        """The forward of a style that replaces the module's own; None: `install` selects one."""
        contract = row.contract
        if contract.defers_logits:
            return deferred_head(
                Vocabulary(self._width(row), self.group, self.inputs), self.resolved.plan.options.loss_parallel
            )
        if (contract.splits_experts or contract.sends_tokens) and not self.model.modules[row.fqn].stacked:
            allow_any_width(module, [self._parameter(row.fqn, slot.key).layout for slot in planned.slots])
        if contract.sends_chosen_rows:
            return scaled_experts(module, self._expert_ranks(row), num_choices(self.model, row.fqn))
        if contract.sends_tokens:
            return whole_experts(form_of(module), self._expert_ranks(row))
        if contract.traits.wraps:
            return self._adapted(module, row)
        facts, is_split = self.model.modules[row.fqn], self.group.size > 1
        if contract.splits_experts and (is_split or facts.inner):
            planned.convert_choices = self._choice_conversion(contract) if is_split else None
            return split_experts(form_of(module), self.group, facts.num_experts)
        if not is_split:
            return _forward_reading_children(module, read)
        forwards: dict[str, Callable[[], Callable | None]] = {
            "embedding": lambda: vocabulary_embedding(module, self.group, planned.leave if contract.dtensors else None),
            "rms_norm": lambda: sharded_rms_norm(self.group),
            "gated_norm": lambda: sharded_gated_norm(
                module, self._parameter(row.fqn, "weight"), self.group, self._subgroup
            ),
            "channel_norm": lambda: sharded_channel_norm(module, self._parameter(row.fqn, "weight").layout, self.group),
            "scan": lambda: scan_forward(read),
            "multihead": lambda: sharded_multihead(self.group),
            "ulysses": lambda: self._exchanging_attention(module, planned, contract),
            "dense experts": lambda: dense_experts if contract.enter is Conversion.GATHER_SEQUENCE else None,
            "bias of first rank": lambda: provider("adapted_layers").bias_of_first_rank(self.group),
        }
        if contract.forward_factory is not None:
            return contract.forward_factory(module, self.group)
        return forwards[contract.compute]() if contract.compute in forwards else _forward_reading_children(module, read)

    def _exchanging_attention(self, module: nn.Module, planned: ModuleRuntime, contract: Contract) -> Callable:
        planned.region = self.region
        return ulysses_attention(module, contract.split)

    def install_added(self) -> None:
        """Install what was added to a planned model: `model` has the facts of these modules alone."""
        for fqn, facts in self._innermost_first():
            module, row = self.model.objects[fqn], self.resolved.modules.get(fqn)
            earlier = installed(module)
            known = {slot.key for slot in earlier.slots} if earlier is not None else set()
            slots = tuple(self._slot(fqn, key) for key in facts.shapes if key not in known)
            if earlier is None:
                self._install(module, slots, row, ())
            elif slots:  # a container of one more parameter
                earlier.slots = (*earlier.slots, *slots)
            elif row is not None and row.contract.traits.wraps:  # with one more adapter
                add_step(module, PLANNED, self._adapted(module, row))

    def _innermost_first(self) -> list[tuple[str, ModuleFacts]]:
        """The modules, with those that call an adapted layer after what they call."""
        rows = self.resolved.modules

        def depth(name: str) -> int:
            return name.count(".") if name in rows and rows[name].contract.traits.wraps else 1000

        return sorted(self.model.modules.items(), key=lambda item: -depth(item[0]))

    def _adapted(self, module: nn.Module, row: ModuleRow) -> Callable:
        """The forward of a module that calls a layer and its adapters."""
        layer = f"{row.fqn}.{BASE}"
        while self.resolved.modules[layer].contract.traits.wraps:
            layer = f"{layer}.{BASE}"
        contract = self.resolved.modules[layer].contract
        if contract.computes_experts:
            key = getattr(module, "parameter_name", "")
            parameter = self._parameter(layer, self.resolved.facts.modules[layer].stacked.get(key, (key,))[0])
            layout = of_elements(parameter.layout, parameter.fact.packs)
            return provider("adapted_experts").adapted_experts(
                module, self.model.objects[layer], layout, self._rank(parameter)
            )
        if hasattr(module, "parameter_name"):
            return provider("adapted_experts").adapted_matrix(module, self.model.objects[layer])
        if contract.defers_logits:
            raise provider("adapted_layers").deferred_with_adapter(row.fqn)
        is_split = self.group.size > 1 and contract.is_linear
        sums = is_split and contract.traits.sums_output
        return provider("adapted_layers").adapted_forward(module, self.group, converts=is_split, sums=sums)

    def _input_conversion(self, row: ModuleRow) -> Callable | None:
        if row.contract.dtensors:
            return input_conversion(row.contract, self.tp, self.group, self.dtensor_conversions)
        return self._conversion(row.contract.enter, row, fused=False)

    def _conversion(self, conversion: Conversion, row: ModuleRow, fused: bool) -> Callable | None:
        """The op of a boundary conversion, bound to its group; None where there is nothing to do."""
        group, dim, reads = self.group, row.contract.sequence_dim, bool(row.contract.uses)
        if conversion is Conversion.VOCABULARY:
            return partial(mark, vocabulary=Vocabulary(self._width(row), group, self.inputs))
        # tokens are split and gathered by the forward of whole experts itself
        if conversion in (Conversion.NONE, Conversion.SPLIT_TOKENS, Conversion.GATHER_TOKENS) or group.size == 1:
            return None
        bound: dict[Conversion, Callable[[], Callable]] = {
            # a block may write to its input, which its copy refuses as a view; a linear only reads
            Conversion.COPY: lambda: (
                self._shared_conversion(conversion, dim) if reads else partial(ops.copy, group=group)
            ),
            Conversion.SUM_BOTH: lambda: partial(ops.sum_both, group=group),
            Conversion.REDUCE: lambda: partial(ops.reduce_owned if fused else ops.reduce, group=group),
            Conversion.GATHER_SEQUENCE: lambda: self._shared_conversion(conversion, dim),
            Conversion.SCATTER_SEQUENCE: lambda: partial(self.region.scatter, dim=dim),
            Conversion.LEAVE_REGION: lambda: self.region.gather_all,
            Conversion.ENTER_REGION: lambda: self.region.rescatter,
            Conversion.GATHER_LAST: lambda: partial(
                ops.gather,
                group=group,
                dim=row.contract.feature_dim,
                full=self._width(row),
                gradient="replicate",
            ),
            Conversion.SPLIT_LAST: lambda: partial(ops.split, group=group, dim=-1),
        }
        return bound[conversion]()

    def _shared_conversion(self, conversion: Conversion, dim: int) -> SharedConversion:
        """The object that does this conversion for all modules of the model."""
        key = None if conversion is Conversion.COPY else dim
        if key not in self.shared_conversions:
            convert = (
                partial(ops.copy_to_read, group=self.group) if key is None else partial(self.region.gather, dim=dim)
            )
            self.shared_conversions[key] = SharedConversion(convert)
        return self.shared_conversions[key]

    def _expert_ranks(self, row: ModuleRow) -> ExpertRanks:
        experts, options = self.model.modules[row.fqn].num_experts, self.resolved.options
        group = self.experts
        if group is None:  # consecutive ranks of tp
            first = self.group.rank // options.expert_ranks * options.expert_ranks
            group = self._subgroup(tuple(range(first, first + options.expert_ranks)))
        same = self.group if row.contract.enter is Conversion.SPLIT_TOKENS and self.group.size > 1 else None
        chunks, order = 1 if options.overlap == "off" else EXPERT_CHUNKS, order_of(options.expert_placement, row.fqn)
        return ExpertRanks(row.fqn, group, options.etp, experts, chunks, same, order)

    def _choice_conversion(self, contract: Contract) -> Callable:
        """The conversion of choices and their weights as those of tokens, which they follow along their first dim."""
        if contract.enter is Conversion.COPY:
            return partial(ops.copy_to_read, group=self.group)
        return partial(self.region.gather, dim=contract.sequence_dim)

    def _width(self, row: ModuleRow) -> int:
        """The full output width of a column linear or embedding."""
        weight = self._parameter(row.fqn, self.model.modules[row.fqn].weight_key)
        layout = of_elements(weight.layout, weight.fact.packs)
        assert layout.dim is not None
        return layout.shape[layout.dim]

    def _install_overlap(self, planned: PlannedCallSite) -> None:
        """Make the linears of a call site run its collective matmul."""
        module, contract = self.model.objects[planned.fqn], self.resolved.modules[planned.fqn].contract
        call_site = self.overlap.add(planned, self.group)
        by_sequence = planned.op in ("all_gather_linear", "linear_reduce_scatter")
        region = self.region if by_sequence else None
        if not planned.consumers:
            transposed = is_conv1d(module)
            shape = self._largest_shape(planned.fqn)
            features = (shape[0], shape[1]) if transposed else (shape[1], shape[0])
            row_linear = OverlappedRowLinear(
                call_site, region, contract.sequence_dim, transposed=transposed, features=features
            )
            install_overlapped(module, overlapped_row, row_linear)
            return
        linears = [self.model.objects[fqn] for fqn in planned.consumers]
        shared = SharedInput(
            call_site,
            region,
            contract.sequence_dim,
            linears=linears,
            widths=[self._local_width(fqn) for fqn in planned.consumers],
            max_widths=[max(self._largest_shape(fqn)[self._out_dim(fqn)], 1) for fqn in planned.consumers],
        )
        if planned.consumers == (planned.fqn,):
            install_overlapped(module, overlapped_column, shared)
            return
        install_overlapped(module, overlapped_block, shared)
        block = installed(module)
        assert block is not None
        block.enter = shared.enter
        for index, linear in enumerate(linears):
            install_overlapped(linear, overlapped_consumer, shared, index)

    def _largest_shape(self, fqn: str) -> tuple[int, ...]:
        """The local shape of a linear's weight on the rank that stores the most of it."""
        layout = self._parameter(fqn, "weight").layout
        return max(layout.local_shape(rank) for rank in range(self.group.size))

    def _out_dim(self, fqn: str) -> int:
        return 1 if is_conv1d(self.model.objects[fqn]) else 0

    def _local_width(self, fqn: str) -> int:
        """Output features of a column linear on this rank."""
        layout = self._parameter(fqn, "weight").layout
        assert layout.dim is not None
        return layout.local_shape(self.group.rank)[layout.dim]

    def _install_heads(self) -> None:
        """Number the heads of `flex_attention` in modules whose projections are sharded."""
        if self.group.size == 1 or hasattr(self.model.root, "config"):  # transformers' functions number no heads
            return
        for fqn in attention_modules(self.model.objects):
            layouts: list[Layout] = []
            for name, row in self.resolved.modules.items():
                key = self.model.modules[name].weight_key if name in self.model.modules else ""
                if key and row.contract.traits.splits_output and name.startswith(f"{fqn}."):
                    weight = self._parameter(name, key)
                    layouts.append(of_elements(weight.layout, weight.fact.packs))
            if layouts:
                own = [
                    key for key in self.model.modules[fqn].shapes if self._parameter(fqn, key).layout.dim is not None
                ]
                shard = head_shard(fqn, layouts, self.group.rank, tuple(own))
                install_heads(self.model.objects[fqn], shard)

    # -- attributes and region ------------------------------------------------------------------------------------

    def _planned_inside(self, fqn: str) -> list[tuple[nn.Module, Contract]]:
        rows = self.resolved.modules.items()
        inside = [(name, row.contract) for name, row in rows if name.startswith(f"{fqn}." if fqn else "") and name]
        return [(self.model.objects[name], contract) for name, contract in inside if name in self.model.objects]

    def _set_local_attributes(self, fqn: str) -> None:
        module = self.model.objects[fqn]
        values: dict[str, Any] = dict(self.resolved.attributes.get(fqn, {}))
        row = self.resolved.modules.get(fqn)
        if row is not None and row.contract.sizes_by_tensor:
            values = {path: sized(dotted(module, path), value) for path, value in values.items()}
        for attribute, key in (row.contract.local_attributes if row else {}).items():
            parameter = self._parameter(fqn, key)
            layout = parameter.layout
            dim = layout.sharded_dims[0]
            values[attribute] = layout.local_shape(self._rank(parameter))[dim]
            if attribute == "groups":  # of several channels each
                values[attribute] = module.groups * values[attribute] // layout.shape[dim]
        set_local(module, values)

    def _install_region(self, region: RegionRow) -> None:
        """Shard hidden states where the region begins, gather them where it ends."""
        if self.group.size == 1:
            return
        objects = self.model.objects  # of this pipeline stage, where the region may begin or end on another one
        if region.enter in objects:
            first = objects[region.enter]
            planned = self._planned(first)
            planned.argument = argument_of(first, region.argument)
            planned.enter = self.region.enter
            install(first, planned)
        if region.leave in objects:
            planned = self._planned(objects[region.leave])
            planned.leave = self.region.leave
            install(objects[region.leave], planned)
        if region.enter in objects and region.leave in objects:
            self.recorded.install(region.enter, objects)
        elif (decoder := region.enter.rpartition(".")[0].rpartition(".")[0]) in objects:
            objects[decoder].register_forward_pre_hook(refuse_hidden_states, with_kwargs=True)

    def _planned(self, module: nn.Module) -> ModuleRuntime:
        return installed(module) or ModuleRuntime(())


def _forward_reading_children(module: nn.Module, read: tuple[str, ...]) -> Callable | None:
    """The forward of a module that reads the parameters of its children; None: `install` selects one."""
    if isinstance(module, nn.MultiheadAttention):
        return replicated_multihead
    return reading_children(read) if read else None
