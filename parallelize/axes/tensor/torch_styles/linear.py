"""Column and row styles, for linears and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize.axes.tensor.layers.embedding import check_embedding, vocabulary_embedding
from parallelize.axes.tensor.placements import BiasedOutput, convert_output, dim_of, local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime, install
from parallelize.axes.tensor.torch_styles.boundary import ModuleStyle, Target, planned_of, require_kind
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import chunked, replicated
from parallelize.comm.groups import Group
from parallelize.ops.collectives import gather_dim
from parallelize.plan.styles.style import ModuleFacts


class ColwiseParallel(ModuleStyle):
    """Split a linear's output features, or an embedding's columns.

    Weight [out, in] -> Shard(0), bias -> Shard(0), embedding weight -> Shard(1).

    Args:
        input_layouts: of the input before conversion (default: Replicate). A sharded input is gathered.
        output_layouts: of the output (default: Shard(-1)).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`.
    Cost: Replicate input and Shard(-1) output: none forward, one all-reduce of the input gradient backward. Sharded
        input: an all-gather forward, a reduce-scatter backward. Replicate output: an all-gather forward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.use_local_output = use_local_output

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Check that `module`, which `facts` describe, is a linear or an embedding.

        Raises: ModelError `wrong-module-for-style`.
        """
        require_kind(self, facts, ("linear", "conv1d", "embedding"))

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. Its parameters become DTensors, and its forward a planned
        one."""
        facts, mesh, group = target.facts, target.mesh, target.group
        dim = 0 if facts.kind == "linear" else 1
        layouts = {
            key: chunked(shape, 0 if len(shape) == 1 else dim, group.size) for key, shape in facts.shapes.items()
        }
        planned = planned_of(target, layouts)
        if facts.kind == "conv1d":
            target.module.__dict__["nf"] = layouts["weight"].local_size(group.rank)
        if facts.kind == "embedding":
            planned.enter = partial(_full_ids, group=group, source=self.input_layouts[0])
        else:
            planned.enter = target.column_conversion(self.input_layouts[0])
        planned.leave = partial(
            convert_output,
            mesh=mesh,
            group=group,
            source=Shard(-1),
            desired=self.output_layouts[0],
            width=facts.shapes["weight"][dim],
            local=self.use_local_output,
        )
        install(target.module, planned)


class RowwiseParallel(ModuleStyle):
    """Split a linear's input features, or an embedding's rows; partial outputs are summed, the bias is added once.

    Weight [out, in] -> Shard(1), bias -> Replicate, embedding weight -> Shard(0).

    Args:
        input_layouts: of the input before conversion (default: Shard(-1), also for an embedding's ids, as in PyTorch).
        output_layouts: of the output (default: Replicate).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`, `bias-on-shards`.
    Cost: Replicate output: one all-reduce forward, none backward. Shard output: a reduce-scatter forward, an all-gather
        backward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or Shard(-1),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Check that `module`, which `facts` describe, is a linear or an embedding that can be split by rows.

        Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`, `bias-on-shards`.
        """
        require_kind(self, facts, ("linear", "conv1d", "embedding"))
        if facts.kind == "embedding":
            check_embedding(module, facts.fqn)
        out = self.output_layouts[0]
        if "bias" in facts.shapes and out.is_partial():
            what = f"{facts.fqn!r} has a bias, which cannot be added once to an output that is {out}"
            fix = "output_layouts=Replicate() or Shard(1), or bias=False"
            raise ModelError(Problem("bias-on-shards", what, fix=fix))

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. Its parameters become DTensors, and its forward a planned
        one."""
        facts, group = target.facts, target.group
        dim = 1 if facts.kind == "linear" else 0
        layouts = {
            key: replicated(shape, group.size) if len(shape) == 1 else chunked(shape, dim, group.size)
            for key, shape in facts.shapes.items()
        }
        scattered = self.output_layouts[0].is_shard()
        planned = planned_of(target, layouts, partial_keys=("bias",) if scattered else ())
        reduce_output = partial(
            convert_output,
            mesh=target.mesh,
            group=group,
            source=Partial(),
            desired=self.output_layouts[0],
            width=None,
            local=self.use_local_output or planned.bias is not None,
        )
        if facts.kind == "embedding":
            self._install_embedding(target, planned, reduce_output)
            return
        source = self.input_layouts[0]
        planned.enter = partial(
            local_input, mesh=target.mesh, group=group, source=source, desired=Shard(-1), partial_grad=False
        )
        planned.leave, planned.defer_bias = reduce_output, True
        planned.bias_group = group if scattered else None
        if planned.bias is not None and not self.use_local_output:
            planned.leave = biased = BiasedOutput(reduce_output, target.mesh, self.output_layouts[0])
            target.module.register_forward_hook(biased.wrap)
        install(target.module, planned)

    def _install_embedding(self, target: Target, planned: ModuleRuntime, reduce_output: Callable) -> None:
        forward = vocabulary_embedding(target.module, target.group, reduce_output)
        planned.enter = partial(_full_ids, group=target.group, source=self.input_layouts[0])
        install(target.module, planned, forward)


def _full_ids(ids: torch.Tensor, group: Group, source: Placement) -> torch.Tensor:
    """The full ids on every rank, to look up in the rows or columns of an embedding."""
    if isinstance(ids, DTensor):
        return ids.full_tensor()
    if not source.is_shard():
        return ids
    dim = dim_of(source) % ids.ndim
    return gather_dim(ids, group, dim, ids.shape[dim] * group.size)
