"""The attention kernel that is modeled: what it saves for backward, and its work.

On meta tensors, `scaled_dot_product_attention` would take the path that materializes all scores, which devices with a
fused kernel do not take. Here the call becomes the CPU's fused op. It saves query, key, value, output and one number
per token and head, as the flash kernels of CUDA do. A mask that is passed is saved too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.axes.tensor.experts.expert_forms import called_by_expert, even_sizes
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.attention.flex_attention import flex_served
from parallelize.plan.inner_experts import inner_experts
from parallelize.state.forward_steps import EXPERTS, add_step, restored_forwards

T = torch.Tensor
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@contextmanager
def forwards_on_meta(model: nn.Module) -> Iterator[None]:
    """Within the block, meta tensors run what a device runs: `scaled_dot_product_attention` is the fused op, also under
    recompute in backward, experts are grouped matmuls, and a forward may enter autocast by the device of a tensor."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", fused_attention, "AutogradMeta")
    library.impl("_grouped_mm", grouped_matmul, "Meta", allow_override=True)
    try:
        with private.autocast_of_meta(), grouped_experts(model), flex_served():
            yield
    finally:
        library._destroy()


def fused_attention(
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """As `torch.nn.functional.scaled_dot_product_attention`. Dropout takes no memory, and shared heads are not
    expanded."""
    widths_differ = len({query.shape[-1], key.shape[-1], value.shape[-1]}) > 1
    if widths_differ or query.ndim != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return _unfused(query, key, value, attn_mask, is_causal, scale)  # as PyTorch does where no fused kernel applies
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _unfused(query: T, key: T, value: T, mask: T | None, is_causal: bool, scale: float | None) -> T:
    """Attention with all scores in memory."""
    if query.ndim == 4 and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


# -- grouped model ---------------------------------------------------------------------------------------------------
# The grouped matmul of experts that is modeled: every expert gets as many tokens as any other. Which experts tokens
# choose is a matter of values, which meta tensors do not have. A grouped matmul has results, work and gradients that
# do not depend on them: PyTorch's op runs on meta, for which it knows bfloat16 alone.


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
    """Within the block, experts of `transformers` run as grouped matmuls: their other forwards loop over the values of
    choices.

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
                    stack.enter_context(restored_forwards([module]))
                    add_step(module, EXPERTS, _with_even_sizes)
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
    """The config that says how stacked experts compute; None for any other module."""
    config = vars(module).get("config")
    return config if "is_transposed" in vars(module) and hasattr(config, "_experts_implementation") else None
