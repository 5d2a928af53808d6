"""LoRA of PEFT on the stacked weights of quantized experts (`target_parameters`), which are no parameters any more.

PEFT finds weights by `named_parameters`, and changes one by a parametrization during a forward. Here the weights are
listed for it, and its factors are added expert by expert. PEFT is not imported: what is not imported when a model is
quantized is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from parallelize.base.patches import active as patches
from parallelize.state.quantization.quantized_experts import (
    QuantizedExperts,
)
from parallelize.state.quantization.quantized_stack import LowRankParts


def show_stacks_to_peft() -> None:
    """Let PEFT, where it is imported, adapt the weights of quantized experts."""
    tuner: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    if hasattr(tuner, "_inject_parameters"):
        patches.replace(tuner, "_inject_parameters", _listing_stacks)
    wrapper: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if hasattr(wrapper, "_activate_lora"):
        patches.replace(wrapper, "_activate_lora", _adding_factors)


def _listing_stacks(stock: Callable[..., Any]) -> Callable[..., Any]:
    def inject(self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
        for module in experts:
            module.__dict__["named_parameters"] = partial(_named, module)
        try:
            return stock(self, peft_config, model, *args, **kwargs)
        finally:
            for module in experts:
                del module.__dict__["named_parameters"]

    return inject


def _named(module: QuantizedExperts, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The module's parameters, then its stacked weights."""
    yield from nn.Module.named_parameters(module, *args, **kwargs)
    yield from ((name, getattr(module, name)) for name in module.stacked)


def _adding_factors(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ParamWrapper._activate_lora`, which of quantized experts makes no dense weight."""

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        experts, key = self.get_base_layer(), self.parameter_name
        if not isinstance(experts, QuantizedExperts):
            with stock(self, active_adapters):
                yield
            return
        before = experts.__dict__.get(key)
        stack = getattr(experts, key)
        for name in active_adapters:
            if name in self.lora_A:
                left, right, scaling = self.get_delta_factors(name)
                stack = stack.with_adapter(LowRankParts([(left.unbind(0), right.unbind(0))], 0, scaling))
        experts.__dict__[key] = stack
        try:
            yield
        finally:
            del experts.__dict__[key]
            if before is not None:
                experts.__dict__[key] = before

    return activate
