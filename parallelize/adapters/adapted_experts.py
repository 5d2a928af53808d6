"""LoRA on the stacked weights of experts and on routers (PEFT's `target_parameters`): each rank adds its part of s B A
to the part that it stores.

PEFT registers a parametrization for each forward, which would compute with DTensors. Here its module computes the same
weights on shards. A [experts x r, in] and B [out, r x experts] are those of the rank's experts where these are whole;
else they are full on every rank, which has a part of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.planned_forward import ModuleRuntime, on_local_parameters, read_changed_parameters
from parallelize.base.layout import Layout
from parallelize.state.quantization.quantized_stack import LowRankParts, QuantizedStack

T = torch.Tensor


def adapted_experts(module: Any, experts: nn.Module, layout: Layout, rank: int) -> Callable:
    """The forward of PEFT's module around the experts, or around another such module of them.

    Args:
        experts: the planned module that has the parameter.
        layout: of that parameter. rank: this rank's index on the axis of the layout.
    """

    def changed(self: Any, name: str, weight: Any) -> Any:
        if isinstance(weight, QuantizedStack):
            return weight.with_adapter(_low_rank(self, name, layout, rank))
        return weight + _delta(self, name, layout, rank).to(weight.dtype)

    return _changing_a_parameter(module, experts, changed)


def adapted_matrix(module: Any, owner: nn.Module) -> Callable:
    """The forward of PEFT's module around one with an adapted matrix [out, in] that is full on each rank: a router's.

    Args:
        owner: the planned module that has the parameter.
    """

    read_changed_parameters(owner)

    def changed(self: Any, name: str, weight: T) -> T:
        down, up = (_local_weight(getattr(self, key)[name]) for key in ("lora_A", "lora_B"))
        return weight + ((up @ down) * self.scaling[name]).to(weight.dtype)

    return _changing_a_parameter(module, owner, changed)


def _changing_a_parameter(module: Any, owner: nn.Module, change: Callable[[Any, str, Any], Any]) -> Callable:
    """The forward of PEFT's module, in which `owner` reads another value of its parameter. change: (module, adapter,
    value)."""
    names = _names_to(owner, module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> T:
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not adapters:
            return on_local_parameters(self, self._applied.planned, args, kwargs)
        planned: ModuleRuntime = self.get_submodule(names)._applied.planned
        key, earlier = self.parameter_name, planned.reparametrized
        changed_weight: list[Any] = []  # once, of experts that run on several chunks of tokens

        def changed(weight: Any) -> Any:
            if not changed_weight:
                weight = earlier[key](weight) if key in earlier else weight
                for name in adapters:
                    weight = change(self, name, weight)
                changed_weight.append(weight)
            return changed_weight[0]

        planned.reparametrized = {**earlier, key: changed}
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            planned.reparametrized = earlier

    return forward


def _names_to(experts: nn.Module, module: nn.Module) -> str:
    """The path from PEFT's module to the experts."""
    return next(name for name, inner in module.named_modules() if inner is experts)


def _low_rank(module: Any, adapter: str, layout: Layout, rank: int) -> LowRankParts:
    """This rank's part of s B A, which is never dense: of quantized experts, the factors for each part that the rank
    stores."""
    by_expert, up, is_transposed, stored = _factors(module, adapter, layout, rank)
    parts = []
    for experts, second, third in stored:
        out, inputs = (third, second) if is_transposed else (second, third)
        of_out, of_inputs = up[out, :, experts], by_expert[experts, :, inputs]  # [out, r, experts], [experts, r, in]
        if is_transposed:
            left, right = of_inputs.transpose(1, 2), of_out.permute(2, 1, 0)
        else:
            left, right = of_out.permute(2, 0, 1), of_inputs
        parts.append((left.unbind(0), right.unbind(0)))
    return LowRankParts(parts, max((layout.dim or 0) - 1, 0), module.scaling[adapter])


def _delta(module: Any, adapter: str, layout: Layout, rank: int) -> T:
    """This rank's part of s B A, in the shape of its part of the weight."""
    by_expert, up, is_transposed, stored = _factors(module, adapter, layout, rank)
    empty = (slice(0, 0),) * 3
    parts = [_block(by_expert, up, part, is_transposed) for part in stored or [empty]]
    delta = parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim or 0)
    if not stored:  # a gradient of zeros
        delta = delta.sum() + delta.new_zeros(layout.local_shape(rank))
    return delta * module.scaling[adapter]


def _factors(module: Any, adapter: str, layout: Layout, rank: int) -> tuple[T, T, bool, list[tuple[Any, ...]]]:
    """(A [experts, r, in], B [out, r, experts], whether weights are [in, out], the parts of them that this rank
    stores)."""
    down, up = (_local_weight(getattr(module, key)[adapter]) for key in ("lora_A", "lora_B"))
    rank_of_adapter = module.r[adapter]
    by_expert = down.view(-1, rank_of_adapter, down.shape[-1])  # [experts, r, in]
    up = up.view(up.shape[0], rank_of_adapter, -1)  # [out, r, experts]
    is_transposed = not module._did_swap_in_out_features  # stored as [experts, in, out]
    stored: list[tuple[Any, ...]] = [pair.full for pair in layout.slices(rank)]
    if layout.dim == 0 and len(stored) > 1:  # experts that do not follow each other
        stored = [([n for part in stored for n in range(part[0].start, part[0].stop)], *stored[0][1:])]
    if by_expert.shape[0] != module.num_experts:  # those of this rank
        stored = [(slice(0, by_expert.shape[0]), *part[1:]) for part in stored]
    return by_expert, up, is_transposed, stored


def _block(down: T, up: T, part: tuple[Any, ...], is_transposed: bool) -> T:
    experts, second, third = part
    out, inputs = (third, second) if is_transposed else (second, third)
    equation = "ore,eri->eio" if is_transposed else "ore,eri->eoi"
    return torch.einsum(equation, up[out, :, experts], down[experts, :, inputs])


def _local_weight(linear: Any) -> T:
    return linear._applied.planned.weight.local(linear._parameters)
