"""Layers with adapters of PEFT: the forward of PEFT's module on shards, inside the boundary conversions of the layer.

The layer keeps its rule and its own planned forward, which also runs it once PEFT has taken the adapter away.
Called by its wrapper it computes on its shard only: the wrapper has converted the input, which adapters read too, and
converts the sum of the layer's output and those of the adapters. A reduction is therefore done once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.tensor.planned_forward import (
    ModuleRuntime,
    add_bias,
    convert_argument,
    hide_local,
    installed,
    on_shard,
)
from parallelize.axes.tensor.planned_forward import on_local_parameters as run_stock
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.adapters import BASE
from parallelize.plan.block_formats import is_conv1d
from parallelize.state.forward_steps import ADAPTED, add_step, run_inner

_READ = ("lora_embedding_A", "lora_embedding_B", "ia3_l")
"""Children whose parameters the forward of the wrapper reads."""


def adapted_forward(module: nn.Module, group: Group, *, converts: bool, sums: bool) -> Callable:
    """The forward of a module that calls a layer and its adapters, which are installed before it.

    Args:
        converts: the layer is a column or row linear, whose conversions are done around its adapters.
        sums: it is a row linear.
    """
    reads = any(True for _ in _shown(module))
    if not converts:
        return _reading(_stock_forward) if reads else _stock_forward
    base = module.get_submodule(BASE)
    planned = installed(base)
    assert planned is not None
    add_step(base, ADAPTED, _layer)
    if sums and getattr(module, "ia3_l", None) and planned.bias is not None and not module.is_feedforward:
        _scale_bias(module, planned, group)
    for norm in getattr(module, "lora_magnitude_vector", {}).values() if sums else ():
        norm.__dict__["get_weight_norm"] = SummedWeightNorm(group, norm.fan_in_fan_out)
    return _reading(_around_linear) if reads else _around_linear


def _scale_bias(module: nn.Module, planned: ModuleRuntime, group: Group) -> None:
    """Add the bias before the reduction, on one rank, where (IA)^3 scales the output with it.

    Raises: ModelError `unplanned-adapter` for a bias that trains: its gradient is then a part of a sum.
    """
    if module.get_submodule(BASE).bias.requires_grad:
        what = f"(IA)^3 scales the output of a row linear ({type(module).__name__}) whose bias trains"
        raise ModelError(Problem("unplanned-adapter", what, fix="freeze the bias, or make the layer a feedforward one"))
    planned.bias_scale = 1.0 if group.rank == 0 else 0.0


def _shown(module: nn.Module) -> Iterator[str]:
    """Submodules whose parameters the code of the wrapper reads: bare ones, and for DoRA the weights of the layer and
    of LoRA."""
    for key in _READ:
        if getattr(module, key, None):
            yield key
    if getattr(module, "lora_magnitude_vector", None):
        yield BASE
        yield from (f"{key}.{name}" for key in ("lora_A", "lora_B") for name in getattr(module, key, {}))


def _layer(self: Any, input: torch.Tensor) -> torch.Tensor:
    """A linear with adapters: by itself as planned, and inside of its wrapper on its shard alone."""
    planned: Any = self._applied.planned
    if not planned.in_adapter:
        return run_inner(self, ADAPTED, (input,), {})
    bias = None
    if planned.bias is not None and (planned.bias_scale is not None or not planned.defer_bias):
        bias = planned.bias.local(self._parameters)
        bias = bias if planned.bias_scale is None else bias * planned.bias_scale
    if planned.weight is None:
        return on_shard(self, planned, bias, (input,), {})
    weight = planned.weight.local(self._parameters)
    if not is_conv1d(self):
        return F.linear(input, weight, bias)
    out = input @ weight  # Conv1D stores its weight as [in, out]
    return out if bias is None else out + bias


def _around_linear(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    base = self.base_layer
    planned: ModuleRuntime = base._applied.planned
    if planned.enter is not None:
        args, kwargs = convert_argument(planned.enter, (0, "x"), args, kwargs)
    planned.in_adapter = True
    try:
        out = _stock_forward(self, *args, **kwargs)
    finally:
        planned.in_adapter = False
    if planned.leave is not None:
        out = planned.leave(out)
    if planned.bias is None or not planned.defer_bias or planned.bias_scale is not None:
        return out
    return add_bias(planned, out, planned.bias.local(base._parameters))


def _stock_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return run_stock(self, self._applied.planned, args, kwargs)


def _reading(forward: Callable) -> Callable:
    """A forward that runs while what it reads of submodules are local tensors."""

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters([self.get_submodule(name) for name in _shown(self)]):
            return forward(self, *args, **kwargs)

    return reading


@contextmanager
def _local_parameters(modules: list[Any]) -> Iterator[None]:
    try:
        for module in modules:
            planned = module._applied.planned
            planned.shows_local += 1
            for slot in planned.slots:
                is_added_later = slot.key == "bias" and planned.defer_bias
                module.__dict__[slot.key] = None if is_added_later else slot.local(module._parameters)
        yield
    finally:
        for module in modules:
            planned = module._applied.planned
            planned.shows_local -= 1
            if not planned.shows_local:
                hide_local(module.__dict__, planned)


class SummedWeightNorm:
    """DoRA's norm of each row of W + s BA, where a rank has some columns of W and of A: the squares are summed over
    ranks.

    It takes the place of `get_weight_norm` of one adapter. Source: Liu et al., DoRA, 2024, section 4.3, by which it has
    no gradient.
    """

    def __init__(self, group: Group, is_transposed: bool):
        self.group, self.is_transposed = group, is_transposed

    def __deepcopy__(self, memo: dict) -> SummedWeightNorm:
        return SummedWeightNorm(self.group, self.is_transposed)

    def __call__(
        self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
    ) -> torch.Tensor:
        """weight: [out, local in], or its transpose; lora_weight: [out, local in]; DTensors of the full shapes while
        PEFT merges.

        Returns: [out].
        """
        weight = weight.T if self.is_transposed else weight
        adapted = weight + scaling * lora_weight
        norm = torch.linalg.norm(adapted, dim=1)
        if isinstance(adapted, DTensor):
            return norm.to(weight.dtype)
        squares = norm.detach().square()
        return ops.reduce(squares, self.group).sqrt().to(weight.dtype)


def bias_of_first_rank(group: Group) -> Callable:
    """The forward of a linear whose output is a summand of a sum over ranks, so that one rank alone adds its bias."""
    scale = 1.0 if group.rank == 0 else 0.0

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        planned: ModuleRuntime = self._applied.planned
        bias = planned.bias.local(self._parameters)  # type: ignore[union-attr]
        return F.linear(input, planned.weight.local(self._parameters), bias * scale)  # type: ignore[union-attr]

    return forward


def deferred_with_adapter(fqn: str) -> ModelError:
    """The error of a head with an adapter, whose matmul the loss would run without it."""
    what = f"{fqn} has an adapter, and the loss computes logits from the weight of the head alone"
    return ModelError(Problem("unplanned-adapter", what, fix="fuse_loss=False, or no adapter on the head"))
