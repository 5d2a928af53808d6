"""Floating-point operations and bytes of one op, computed from its shapes.

A matmul counts 2 m n k. Attention counts its two matmuls (five in backward); causal attention counts half, because fused kernels
skip the masked half. All other ops count the bytes that they must read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private
from parallelize.tools.analysis.record.trace_data import Kernel

T = torch.Tensor
aten: Any = torch.ops.aten


def kernel_of(func: Any, args: tuple, kwargs: dict, output: Any) -> Kernel | None:
    """The work of an op; None for a view of its input."""
    inputs = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    outputs = [leaf for leaf in private.tree_leaves(output) if isinstance(leaf, T)]
    flops_of = _FLOPS.get(func)
    if flops_of is None and not func._schema.is_mutable and _is_view(inputs, outputs):
        return None
    size = float(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs)))
    return Kernel(flops_of(args, kwargs) if flops_of else 0.0, size, flops_of is not None)


def _is_view(inputs: Iterable[T], outputs: list[T]) -> bool:
    storages = {private.storage_address(x) for x in inputs}
    return all(private.storage_address(x) in storages for x in outputs)


def _bytes(x: T) -> int:
    return x.numel() * x.element_size()


def _matmul_flops(a: T, b: T) -> float:
    return 2.0 * prod(a.shape) * b.shape[-1]


def _attention_forward(args: tuple, kwargs: dict) -> float:
    """args: query, key, value, dropout_p, is_causal."""
    causal = (len(args) > 4 and bool(args[4])) or bool(kwargs.get("is_causal"))
    return _attention_flops(args[0], args[1], 2, causal)


def _attention_backward(args: tuple, kwargs: dict) -> float:
    """args: grad, query, key, value, output, logsumexp, dropout_p, is_causal."""
    causal = (len(args) > 7 and bool(args[7])) or bool(kwargs.get("is_causal"))
    return _attention_flops(args[1], args[2], 5, causal)


def _attention_flops(query: T, key: T, num_matmuls: int, causal: bool) -> float:
    *batch, length, width = query.shape
    flops = 2.0 * prod(batch) * length * key.shape[-2] * width
    return num_matmuls * flops * (0.5 if causal else 1.0)


_FLOPS: dict[Any, Callable[[tuple, dict], float]] = {
    aten.mm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten.bmm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten.addmm.default: lambda args, _: _matmul_flops(args[1], args[2]),
    aten.baddbmm.default: lambda args, _: _matmul_flops(args[1], args[2]),
    aten._grouped_mm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
