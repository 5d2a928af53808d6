"""The fused attention kernels that return each row's log-sum and take it in backward: the CPU's, and on CUDA cuDNN's or
flash attention.

The public `scaled_dot_product_attention` does not return the log-sums, so the dispatcher ops below it are called. On
Hopper cuDNN's kernels take half the time of flash attention's (docs/long-sequences.md). They are called for lengths of
whole tiles of 128 alone: for others versions of them read beyond the keys or give NaN (pytorch #169849, #196678;
cudnn-frontend #1072).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

T = torch.Tensor
_CPU: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_CUDA: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)
_CUDA_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", None)
_CUDNN: Any = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)
_CUDNN_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", None)
_HOPPER, _OLD_CUDNN = 9, 91500  # PyTorch prefers no cuDNN up to 9.15
_CUDNN_WIDTH, _CUDNN_TILE = 128, 128  # wider heads have no backward in every version
_CUDA_WIDTH = 256  # the widest head of flash attention


def serves(q: T, k: T, v: T) -> bool:
    """Whether a fused kernel takes these tensors.

    On meta tensors the CPU's kernel stands for all kernels (see `analysis.record.attention_model`).
    """
    if q.shape[-1] != v.shape[-1] or not q.numel() or not k.numel():
        return False
    if q.device.type in ("cpu", "meta"):
        return _CPU is not None
    if not q.is_cuda or _CUDA is None or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    width = q.shape[-1]  # the public function pads heads to a multiple of 8; the op below it does not
    return q.dtype in (torch.float16, torch.bfloat16) and width <= _CUDA_WIDTH and width % 8 == 0


def forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    """(output [B, H, S, D], log-sums [B, H, S] in float32 at least)."""
    if not q.is_cuda:
        out, lse = _CPU(q, *_repeated(q, k, v), 0.0, causal, scale=scale)
        return out, lse
    if _prefers_cudnn(q, k, v, causal):
        out, lse, *_ = _CUDNN(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.view(q.shape[:3])
    out, lse, *_ = _CUDA(q, *_repeated(q, k, v), 0.0, causal, False, scale=scale)
    return out, lse


def backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    """Gradients of q, k and v, from the output and log-sums over all keys, of which `k` and `v` may be a part."""
    if not q.is_cuda:
        dq, dk, dv = _CPU_BACKWARD(grad, q, *_repeated(q, k, v), out, lse, 0.0, causal, scale=scale)
        return dq, _summed(dk, k), _summed(dv, v)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    drawn, lengths = (seed, seed.new_empty(())), (None, None, q.shape[2], k.shape[2])
    lse = lse.contiguous()  # the kernels ignore the strides of log-sums, so those of a slice of rows must be copied
    if _prefers_cudnn(q, k, v, causal):
        return _CUDNN_BACKWARD(grad, q, k, v, out, lse.unsqueeze(-1), *drawn, None, *lengths, 0.0, causal, scale=scale)
    dq, dk, dv = _CUDA_BACKWARD(grad, q, *_repeated(q, k, v), out, lse, *lengths, 0.0, causal, *drawn, scale=scale)
    return dq, _summed(dk, k), _summed(dv, v)


def _prefers_cudnn(q: T, k: T, v: T, causal: bool) -> bool:
    """Whether cuDNN's kernels are known to be right for these tensors, and faster."""
    if _CUDNN is None or q.shape[-1] > _CUDNN_WIDTH or q.shape[2] % _CUDNN_TILE or k.shape[2] % _CUDNN_TILE:
        return False
    if torch.cuda.get_device_capability(q.device)[0] != _HOPPER or (torch.backends.cudnn.version() or 0) <= _OLD_CUDNN:
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1]))


def _repeated(q: T, k: T, v: T) -> tuple[T, T]:
    """Key and value heads repeated for each query head: flash attention's backward and the CPU's do not support grouped
    heads."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _summed(grad: T, like: T) -> T:
    """The gradient of heads that were repeated."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)
