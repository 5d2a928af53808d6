"""Stacked experts whose weights are stored as codes and scales: the stock module with frozen parameters in the place of
its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn

from parallelize.plan.block_formats import BlockFormat
from parallelize.plan.model_facts import EXPERT_FLAGS
from parallelize.state.quantization.block_codes import BYTES, quantize_rows
from parallelize.state.quantization.quantized_linear import written_weight
from parallelize.state.quantization.quantized_stack import QuantizedStack

T = torch.Tensor


class QuantizedExperts(nn.Module):
    """Mixed into the class of the experts. Each stacked weight `name` is a `QuantizedStack`, computed at each look-up.

    Attributes:
        stacked: name of a weight to the names of its codes and scales.
        packs: name of a parameter to the elements of a row that one of its elements stands for.
        stock_class: of the module that it was. dtype: of the dense weights.

    Shapes: NAME_codes uint8 [experts, rows, columns / codes_per_byte], NAME_scales uint8 [experts, rows, 2 columns /
        block].
    """

    form: BlockFormat
    dtype: torch.dtype
    packs: dict[str, int]
    stacked: dict[str, tuple[str, str]]
    stock_class: type

    def __getattr__(self, name: str) -> Any:
        keys = self.__dict__.get("stacked", {}).get(name)
        if keys is None:
            return super().__getattr__(name)
        codes, scales = (getattr(self, key) for key in keys)
        return QuantizedStack(codes, scales, self.form, self.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("stacked", {}):
            raise written_weight()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[T], T], recurse: bool = True) -> QuantizedExperts:
        """What `.to()` calls. No cast of a model changes codes and scales; it changes the dtype that the weights
        have."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(1, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"form={self.form}"


def stacked_weights(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """The stacked weights [experts, ., .] of experts whose stock forward runs one after another; empty for any other
    module."""
    values = vars(module)
    forward = getattr(type(module).forward, "__wrapped__", None)
    if forward is None or not set(EXPERT_FLAGS[:3]) <= values.keys() or "forward" in values:
        return {}
    return {key: p for key, p in module._parameters.items() if p is not None and p.ndim == 3}


def quantize_experts(module: nn.Module, form: BlockFormat) -> None:
    """Store the stacked weights of experts as codes and scales, one expert at a time. It stays the same object, with
    its hooks."""
    stock: Any = type(module)
    weights = stacked_weights(module)
    other_parameters = {key: p for key, p in module._parameters.items() if key not in weights}
    module._parameters.clear()
    experts: Any = module
    experts.__class__ = _class_of(stock)
    experts.form, experts.dtype, experts.stock_class = form, next(iter(weights.values())).dtype, stock
    experts.stacked = {key: (f"{key}_codes", f"{key}_scales") for key in weights}
    experts.packs = {}
    for key, weight in weights.items():
        for name, pack in zip(experts.stacked[key], (form.codes_per_byte, form.scale_packs), strict=True):
            experts.packs[name] = pack
            stored = torch.empty(*weight.shape[:-1], weight.shape[-1] // pack, dtype=BYTES, device=weight.device)
            experts.register_parameter(name, nn.Parameter(stored, requires_grad=False))
        if not weight.is_meta:
            codes, scales = (experts._parameters[name].data for name in experts.stacked[key])
            for expert in range(len(weight)):
                quantize_rows(weight[expert], form, codes[expert], scales[expert])
    for key, parameter in other_parameters.items():
        experts.register_parameter(key, parameter)


def restore_experts(module: Any) -> None:
    """Make it again what it was, with the dequantized weights, frozen."""
    stacks = {key: getattr(module, key) for key in module.stacked}
    dense = {key: stack.dense().as_subclass(torch.Tensor).clone() for key, stack in stacks.items()}
    coded, stock = set(module.packs), module.stock_class
    other_parameters = {key: p for key, p in module._parameters.items() if key not in coded}
    module._parameters.clear()
    for key in ("form", "dtype", "packs", "stacked", "stock_class"):
        del module.__dict__[key]
    module.__class__ = stock
    for key, weight in dense.items():
        module.register_parameter(key, nn.Parameter(weight, requires_grad=False))
    for key, parameter in other_parameters.items():
        module.register_parameter(key, parameter)


@lru_cache(maxsize=64)
def _class_of(stock: type) -> type:
    """The class of quantized experts of a stock class: its own forward, one expert after another, whatever the config
    chooses."""
    by_expert = stock.forward.__wrapped__  # type: ignore[attr-defined]

    @wraps(by_expert)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = next(iter((*args, *kwargs.values())))
        if tokens.is_meta:  # whose choices have no values: all experts are dense, in the implementation that is modeled
            return _forward_on_dense(self, stock, args, kwargs)
        return by_expert(self, *args, **kwargs)

    return type(f"Quantized{stock.__name__}", (QuantizedExperts, stock), {"forward": forward})


def _forward_on_dense(self: Any, stock: Any, args: tuple, kwargs: dict) -> Any:
    before = {key: self.__dict__[key] for key in self.stacked if key in self.__dict__}
    try:
        for key in self.stacked:
            stack = getattr(self, key)
            self.__dict__[key] = stack.dense() if isinstance(stack, QuantizedStack) else stack
        return stock.forward(self, *args, **kwargs)
    finally:
        for key in self.stacked:
            self.__dict__.pop(key, None)
        self.__dict__.update(before)
