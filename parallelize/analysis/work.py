"""Floating-point operations and bytes of one op, by its shapes.

Products count 2 m n k. Attention counts its two products (five in backward), causal ones half, since fused kernels skip the
masked half. Everything else counts the bytes that it must read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.analysis.records import Kernel

T = torch.Tensor
aten: Any = torch.ops.aten


def kernel_of(func: Any, args: tuple, kwargs: dict, output: Any) -> Kernel | None:
    """The work of an op; None where it only looks at its input in another way."""
    given = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    made = [leaf for leaf in private.tree_leaves(output) if isinstance(leaf, T)]
    counted = _FLOPS.get(func)
    if counted is None and not func._schema.is_mutable and _is_view(given, made):
        return None
    size = float(sum(map(_bytes, given)) + sum(map(_bytes, made)))
    return Kernel(counted(args, kwargs) if counted else 0.0, size, counted is not None)


def _is_view(given: Iterable[T], made: list[T]) -> bool:
    held = {private.storage_address(x) for x in given}
    return all(private.storage_address(x) in held for x in made)


def _bytes(x: T) -> int:
    return x.numel() * x.element_size()


def _mm(a: T, b: T) -> float:
    return 2.0 * prod(a.shape) * b.shape[-1]


def _attention(args: tuple, kwargs: dict, products: int, at: int) -> float:
    query, key = args[at : at + 2]
    causal = bool(args[at + 4]) if at == 0 and len(args) > 4 else bool(args[7]) if at and len(args) > 7 else False
    causal = causal or bool(kwargs.get("is_causal"))
    *batch, rows, width = query.shape
    one = 2.0 * prod(batch) * rows * key.shape[-2] * width
    return products * one * (0.5 if causal else 1.0)


_FLOPS: dict[Any, Callable[[tuple, dict], float]] = {
    aten.mm.default: lambda args, _: _mm(args[0], args[1]),
    aten.bmm.default: lambda args, _: _mm(args[0], args[1]),
    aten.addmm.default: lambda args, _: _mm(args[1], args[2]),
    aten.baddbmm.default: lambda args, _: _mm(args[1], args[2]),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda args, kw: _attention(args, kw, 2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda args, kw: _attention(args, kw, 5, 1),
}
