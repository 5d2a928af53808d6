"""Column and row styles, for linears and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize.errors import ModelError, Problem
from parallelize.forwards import Planned, install
from parallelize.groups import Group
from parallelize.layout import chunked, replicated
from parallelize.ops.collectives import gather_dim
from parallelize.special import check_embedding, vocabulary_embedding
from parallelize.styles.registry import ModuleFacts
from parallelize.torch_styles.conversions import as_dtensor, enter, leave
from parallelize.torch_styles.style import Style, Target, need, planned_of


class ColwiseParallel(Style):
    """Split a linear's output features, or an embedding's columns.

    Weight [out, in] -> Shard(0), bias -> Shard(0), embedding weight -> Shard(1).

    Args:
        input_layouts: of the input as it comes (default Replicate); it is gathered where it is a shard.
        output_layouts: of the output (default Shard(-1)).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`.
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
        need(self, facts, ("linear", "conv1d", "embedding"))

    def install(self, target: Target) -> None:
        facts, mesh, group = target.facts, target.mesh, target.group
        dim = 0 if facts.kind == "linear" else 1
        layouts = {
            key: chunked(shape, 0 if len(shape) == 1 else dim, group.size) for key, shape in facts.shapes.items()
        }
        planned = planned_of(target, layouts)
        if facts.kind == "conv1d":
            target.module.__dict__["nf"] = layouts["weight"].local_size(group.rank)
        if facts.kind == "embedding":
            planned.enter = partial(_whole_ids, group=group, source=self.input_layouts[0])
        else:
            planned.enter = partial(
                enter, mesh=mesh, group=group, source=self.input_layouts[0], want=Replicate(), partial_grad=True
            )
        planned.leave = partial(
            leave,
            mesh=mesh,
            group=group,
            have=Shard(-1),
            want=self.output_layouts[0],
            width=facts.shapes["weight"][dim],
            local=self.use_local_output,
        )
        install(target.module, planned)


class RowwiseParallel(Style):
    """Split a linear's input features, or an embedding's rows; partial outputs are summed, the bias is added once.

    Weight [out, in] -> Shard(1), bias -> Replicate, embedding weight -> Shard(0).

    Args:
        input_layouts: of the input as it comes (default Shard(-1), also for an embedding's ids, as in PyTorch).
        output_layouts: of the output (default Replicate: all-reduce; Shard(1): reduce-scatter).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`, `bias-on-shards`.
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
        need(self, facts, ("linear", "conv1d", "embedding"))
        if facts.kind == "embedding":
            check_embedding(module, facts.fqn)
        out = self.output_layouts[0]
        if "bias" in facts.shapes and (out.is_partial() or (out.is_shard() and out.dim == -1)):
            what = f"{facts.fqn!r} has a bias, which cannot be added once to an output that is {out}"
            raise ModelError(
                Problem("bias-on-shards", what, fix="output_layouts=Replicate() or Shard(1), or bias=False")
            )

    def install(self, target: Target) -> None:
        facts, group = target.facts, target.group
        dim = 1 if facts.kind == "linear" else 0
        layouts = {
            key: replicated(shape, group.size) if len(shape) == 1 else chunked(shape, dim, group.size)
            for key, shape in facts.shapes.items()
        }
        scattered = self.output_layouts[0].is_shard()
        planned = planned_of(target, layouts, partial_keys=("bias",) if scattered else ())
        edge = partial(
            leave,
            mesh=target.mesh,
            group=group,
            have=Partial(),
            want=self.output_layouts[0],
            width=None,
            local=self.use_local_output or planned.bias is not None,
        )
        if facts.kind == "embedding":
            self._install_embedding(target, planned, edge)
            return
        planned.enter = partial(
            enter, mesh=target.mesh, group=group, source=self.input_layouts[0], want=Shard(-1), partial_grad=False
        )
        planned.leave, planned.hide_bias = edge, True
        install(target.module, planned)
        if planned.bias is not None and not self.use_local_output:
            _wrap_output(target, self.output_layouts[0])

    def _install_embedding(self, target: Target, planned: Planned, edge: Callable) -> None:
        forward = vocabulary_embedding(target.module, target.group, edge)
        planned.enter = partial(_whole_ids, group=target.group, source=self.input_layouts[0])
        install(target.module, planned, forward)


def _wrap_output(target: Target, placement: Placement) -> None:
    """Make the output a DTensor after a bias was added to it."""
    mesh = target.mesh
    target.module.register_forward_hook(lambda _m, _a, out: as_dtensor(out, mesh, placement))


def _whole_ids(ids: torch.Tensor, group: Group, source: Placement) -> torch.Tensor:
    """All ids on every rank, which the rows or columns of an embedding are looked up with."""
    if isinstance(ids, DTensor):
        return ids.full_tensor()
    if not source.is_shard():
        return ids
    dim = source.dim % ids.ndim
    return gather_dim(ids, group, dim, ids.shape[dim] * group.size)
