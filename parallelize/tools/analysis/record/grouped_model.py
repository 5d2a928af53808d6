"""The grouped matmul of experts that is modeled: every expert gets as many tokens as any other.

Which experts tokens choose is a matter of values, which meta tensors do not have. A grouped matmul has results, work and gradients that
do not depend on them: PyTorch's op runs on meta, for which it knows bfloat16 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.axes.tensor.experts.expert_forms import called_by_expert, even_sizes
from parallelize.plan.inner_experts import inner_experts

T = torch.Tensor
GROUPED = "grouped_mm"


def grouped_matmul(x: T, weights: T, offs: T | None = None, bias: T | None = None, out_dtype: Any = None) -> T:
    """As `torch._grouped_mm` on meta, of a forward, or of the gradient of tokens or weights.

    Args:
        x, weights: [N, in] and [experts, in, out]; or [in, N] and [N, out].
        offs: [experts], where the tokens of each end.

    Returns: [N, out]; or [experts, in, out].
    """
    shape: tuple[int, ...] = (len(x), weights.shape[-1])
    if weights.ndim == x.ndim:
        assert offs is not None
        shape = (len(offs), *shape)
    return x.new_empty(shape, dtype=out_dtype)


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Within the block, experts of `transformers` run as grouped matmuls: their other forwards loop over the values of choices.

    Experts whose weights are in modules inside run one after another, each with as many tokens.
    """
    key = "_experts_implementation"
    configs = {id(config): config for module in model.modules() if (config := _config_of(module)) is not None}
    before = [(config, getattr(config, key)) for config in configs.values()]
    for config, _ in before:
        setattr(config, key, GROUPED)
    try:
        with ExitStack() as stack:
            for module in model.modules():
                if (inner := inner_experts(module)) is not None and "forward" not in vars(module):
                    stack.enter_context(called_by_expert(module, inner.num_experts))
                elif _sorts_by_expert(module):
                    module.__dict__["forward"] = MethodType(_with_even_sizes, module)
                    stack.callback(module.__dict__.pop, "forward")
            yield
    finally:
        for config, value in before:
            setattr(config, key, value)


def _sorts_by_expert(module: nn.Module) -> bool:
    """Whether a router sorts tokens by experts, and reads how many each of them has."""
    attributes = vars(module)
    is_router = {"top_k", "num_experts", "input_size"} <= attributes.keys() and "forward" not in attributes
    return is_router and list(module._modules) == ["layer"]


def _with_even_sizes(self: Any, tokens: T) -> Any:
    if not tokens.is_meta:
        return type(self).forward(self, tokens)
    with _EvenSizes(even_sizes(len(tokens) * self.top_k, self.num_experts)):
        return type(self).forward(self, tokens)


class _EvenSizes(TorchFunctionMode):
    """What `tolist` of a tensor without values returns."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.sizes if func is T.tolist else func(*args, **(kwargs or {}))


def _config_of(module: nn.Module) -> Any:
    """The config by which stacked experts choose what they run; None for any other module."""
    config = vars(module).get("config")
    return config if "is_transposed" in vars(module) and hasattr(config, "_experts_implementation") else None
