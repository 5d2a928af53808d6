"""The attention kernel that is modeled: what it saves for backward, and its work.

On meta tensors, `scaled_dot_product_attention` would take the path that materializes all scores, which devices with a fused kernel
do not take. Here the call becomes the CPU's fused op. It saves query, key, value, output and one number per token and head, as
the flash kernels of CUDA do. A mask that is passed is saved too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from parallelize.base.torch_private import torch_tensors as private
from parallelize.tools.analysis.record.grouped_model import grouped_experts, grouped_matmul

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
        with private.autocast_of_meta(), grouped_experts(model):
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
    """As `torch.nn.functional.scaled_dot_product_attention`. Dropout takes no memory, and shared heads are not expanded."""
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
