"""Boundary conversions of PyTorch's styles, whose modules may be called with DTensors, and may have to return one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize.comm.groups import Group
from parallelize.styles.contract import Contract, Conversion
from parallelize.tensor.placements import BiasedOutput, convert_output, local_input
from parallelize.tensor.planned_forward import Planned
from parallelize.tensor.shared_conversion import SharedConversion

SharedConversions = dict[tuple[str, int], SharedConversion]


def input_conversion(
    contract: Contract, tp: DeviceMesh, group: Group, conversions: SharedConversions
) -> Callable | None:
    """What makes the plain local input that a module computes with; None where it is one already.

    conversions: of the column linears of the model, which share them, by conversion and dim.
    """
    traits, dim = contract.traits, contract.sequence_dim
    if contract.enter in (Conversion.COPY, Conversion.GATHER_SEQUENCE):
        gathers = contract.enter is Conversion.GATHER_SEQUENCE
        key = contract.enter.value, dim if gathers else 0
        source: Placement = Shard(dim) if gathers else Replicate()
        if key not in conversions:
            conversions[key] = SharedConversion(
                partial(local_input, mesh=tp, group=group, source=source, desired=Replicate(), partial_grad=True)
            )
        return conversions[key]
    if contract.takes_ids:
        return _full_ids
    if traits.splits_output:  # its block has gathered the input
        return None
    desired = Shard(dim) if traits.by_token else Shard(-1)
    source = Replicate() if contract.enter is Conversion.SPLIT_LAST else desired
    adapt = partial(local_input, mesh=tp, group=group, source=source, desired=desired, partial_grad=False)
    return adapt if contract.enter is Conversion.SPLIT_LAST else partial(_local, adapt=adapt)


def return_dtensor(
    module: nn.Module, planned: Planned, contract: Contract, tp: DeviceMesh, group: Group, width: int | None
) -> None:
    """Make the output a DTensor. width: the full size of the last dim where the output is a shard of it."""
    source, desired = _output_placements(contract)
    if contract.adds_bias_after_sum and planned.bias is not None and planned.leave is not None:
        planned.leave = biased = BiasedOutput(planned.leave, tp, desired)
        module.register_forward_hook(biased.wrap)
        return
    planned.leave = partial(
        convert_output, mesh=tp, group=group, source=source, desired=desired, width=width, local=False
    )


def _output_placements(contract: Contract) -> tuple[Placement, Placement]:
    """(before, after) the conversion of the output."""
    dim = contract.sequence_dim
    source: Placement = Shard(-1)
    if contract.traits.sums_output:
        source = Partial()
    elif contract.traits.by_token:
        source = Shard(dim)
    desired = {
        Conversion.GATHER_LAST: Replicate(),
        Conversion.REDUCE: Replicate(),
        Conversion.SCATTER_SEQUENCE: Shard(dim),
    }
    return source, desired.get(contract.leave, source)


def _local(x: torch.Tensor, adapt: Callable) -> torch.Tensor:
    return adapt(x) if isinstance(x, DTensor) else x


def _full_ids(ids: torch.Tensor) -> torch.Tensor:
    return ids.full_tensor() if isinstance(ids, DTensor) else ids
