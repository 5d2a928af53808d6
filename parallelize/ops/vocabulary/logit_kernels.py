"""Kernels for GPUs: softmax statistics of logits in one read, and a cross entropy's gradient in one read and one write.

PyTorch's own ops for the same read and write float32 copies of the logits several times. These compute in float32 and
store nothing but their results. They are Triton's, which torch for CUDA and ROCm brings. `kernel_choice` imports this
file.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallelize.ops.vocabulary.class_targets import RowTerms

T = torch.Tensor
_ROW_BLOCK, _ROW_WARPS = 4096, 8  # entries that a program reads at a time
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 8


@triton.jit
def _totals_kernel(z, highest_out, total_out, width, stride, lowest, block: tl.constexpr):
    """One program a row. Each lane has a maximum and a sum of its own until the row's end."""
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    columns = tl.arange(0, block)
    highest = tl.zeros([block], tl.float32) + lowest
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        inside = columns < width - start
        x = tl.load(z + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    row_highest = tl.max(highest, 0)
    tl.store(highest_out + row, row_highest)
    tl.store(total_out + row, tl.sum(total * tl.exp(highest - row_highest), 0))


@triton.jit
def _gradient_kernel(
    z,
    out,
    highest,
    log_total,
    of_softmax,
    ids,
    of_id,
    of_all,
    width,
    z_stride,
    out_stride,
    has_all: tl.constexpr,
    block: tl.constexpr,
):
    """One program for `block` entries of a row; `out` may be `z`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(z + row * z_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(highest + row) - tl.load(log_total + row))
    grad = p * tl.load(of_softmax + row)
    if has_all:
        grad -= tl.load(of_all + row)
    grad -= tl.where(columns == tl.load(ids + row), tl.load(of_id + row), 0.0)
    tl.store(out + row * out_stride + columns, grad.to(out.dtype.element_ty), mask=inside)


def try_out(z: T) -> None:
    """Run each kernel on logits z [1, 1]. Raises: what Triton raises."""
    highest, total = row_totals(z, 0.0)
    terms = RowTerms(torch.zeros(1, dtype=torch.int64, device=z.device), total, None)
    row_gradients(z, torch.empty_like(z), highest, total, total, terms)


def row_totals(z: T, lowest: float) -> tuple[T, T]:
    """(highest, sum of exp(z - highest)) of each row of z [n, V]: [n] in float32. `highest` is at least `lowest`."""
    highest = torch.empty(z.shape[0], dtype=torch.float32, device=z.device)
    total = torch.empty_like(highest)
    with torch.cuda.device(z.device):
        _totals_kernel[(z.shape[0],)](
            z, highest, total, z.shape[1], z.stride(0), lowest, block=_ROW_BLOCK, num_warps=_ROW_WARPS
        )
    return highest, total


def row_gradients(z: T, out: T, highest: T, log_total: T, of_softmax: T, terms: RowTerms) -> T:
    """out [n, V] = of_softmax exp(z - highest - log_total) - q, with q of `terms`.

    Shapes: all but z and out are [n]. `out` may be `z`.
    """
    rows, width = z.shape
    grid = (rows, triton.cdiv(width, _GRADIENT_BLOCK))
    of_all = of_softmax if terms.of_all is None else terms.of_all
    vectors = [x.contiguous() for x in (highest, log_total, of_softmax, terms.ids, terms.of_id, of_all)]
    with torch.cuda.device(z.device):
        _gradient_kernel[grid](
            z,
            out,
            *vectors,
            width,
            z.stride(0),
            out.stride(0),
            has_all=terms.of_all is not None,
            block=_GRADIENT_BLOCK,
            num_warps=_GRADIENT_WARPS,
        )
    return out
