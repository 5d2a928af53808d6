"""Which attention kernel is modelled: what it keeps for backward, and its work.

On meta tensors `scaled_dot_product_attention` would take the path that writes all scores out, which no device takes where a
fused kernel serves. Here the call becomes the fused op itself: that of the CPU, which keeps query, key, value, output and one
number a row, as the flash kernels of CUDA do. A mask that is given is kept too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

T = torch.Tensor
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Meanwhile `scaled_dot_product_attention` of meta tensors is the fused op: in backward's recomputation too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", fused_attention, "AutogradMeta")
    try:
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
    """As `torch.nn.functional.scaled_dot_product_attention`. Dropout takes no memory, shared heads are not written out."""
    wide = len({query.shape[-1], key.shape[-1], value.shape[-1]}) > 1
    if wide or query.ndim != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return _written_out(query, key, value, attn_mask, is_causal, scale)  # as PyTorch does where no kernel serves
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _written_out(query: T, key: T, value: T, mask: T | None, is_causal: bool, scale: float | None) -> T:
    """Attention by its definition: all scores in memory."""
    if query.ndim == 4 and query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value
