"""The fused attention kernels that return each row's log-sum and take it in backward: the CPU's, and CUDA's flash attention.

The public `scaled_dot_product_attention` does not return the log-sums, so the dispatcher ops below it are called.
"""

from __future__ import annotations

from typing import Any

import torch

T = torch.Tensor
_CPU: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_CUDA: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)
_CUDA_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", None)
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
    out, lse, *_ = _CUDA(q, *_repeated(q, k, v), 0.0, causal, False, scale=scale)
    return out, lse


def backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    """Gradients of q, k and v, from the output and log-sums over all keys, of which `k` and `v` may be a part."""
    keys_values = _repeated(q, k, v)
    if not q.is_cuda:
        dq, dk, dv = _CPU_BACKWARD(grad, q, *keys_values, out, lse, 0.0, causal, scale=scale)
    else:
        rows, columns = q.shape[2], k.shape[2]
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        rest = (None, None, rows, columns, 0.0, causal, seed, seed.new_empty(()))
        # the kernel ignores the strides of log-sums, so those of a slice of rows must be copied
        dq, dk, dv = _CUDA_BACKWARD(grad, q, *keys_values, out, lse.contiguous(), *rest, scale=scale)
    return dq, _summed(dk, k), _summed(dv, v)


def _repeated(q: T, k: T, v: T) -> tuple[T, T]:
    """Key and value heads repeated for each query head: the backward kernels do not support grouped heads."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _summed(grad: T, like: T) -> T:
    """The gradient of heads that were repeated."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)
