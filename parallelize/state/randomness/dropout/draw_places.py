"""Which elements of the global draw a rank draws: told by the shape of the tensor that is filled.

A dim of the batch's rows places it in the global batch, a dim of this rank's tokens in the sequence; without a row, the
numbers are those of the step, in all of its microbatches and on all data ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.ops.random.counter import IndexRun, Key, blocks
from parallelize.state.randomness.dropout.drawn_numbers import Draw
from parallelize.state.randomness.dropout.global_index import ActivationLayout, LocalTokens

T = torch.Tensor


class Order(NamedTuple):
    """A drawn tensor as [rows, tokens, ..]: its own shape with dims moved, and the shape that it is viewed in then.

    has_rows: whether its first dim are rows of the batch, or a multiple of them. by_token: whether its second dim are
    tokens.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    has_rows: bool
    by_token: bool = False


@dataclass(frozen=True)
class DrawPlace:
    """The elements of a draw: of a key, [rows, runs of columns] of the full tensor.

    order: of the local tensor. is_cut: whether other ranks of tp or cp have other elements. first_row: in the global
    batch.
    """

    key: Key
    order: Order
    offsets: T
    runs: list[IndexRun]
    is_cut: bool = False
    first_row: int = 0

    def draw(self, shape: torch.Size, numbers: Draw, dtype: torch.dtype) -> T:
        """The numbers of a local tensor of this shape; zeros for the padding of a shard."""
        out = torch.zeros(self.order.shape, dtype=dtype, device=self.offsets.device)
        flat = out.view(len(self.offsets), -1) if out.numel() else out.view(len(self.offsets), 0)
        for block, index in blocks(self.offsets, self.runs):
            flat[block.rows, block.columns] = numbers(self.key, index).to(dtype)
        moved = out.view([shape[dim] for dim in self.order.dims])
        return moved.permute(torch.tensor(self.order.dims).argsort().tolist()) if len(shape) > 1 else moved.view(shape)


def order_of(shape: torch.Size, rows: int | None, tokens: int | None, whole: int | None, site: str) -> Order:
    """How a drawn tensor is placed.

    Args:
        rows: of this microbatch; None: not known.
        tokens: of each sequence that this rank has; None: it has all. whole: of the full sequence.

    Raises: ModelError `unplaceable-draw`.
    """
    ndim = len(shape)
    batch = _batch_dim(shape, rows)
    if tokens is None:
        return _order_without_tokens(shape, batch)
    if rows and ndim and batch in (None, 0) and shape[0] == rows * tokens and shape[0] != rows:
        return Order(tuple(range(ndim)), (rows, tokens, math.prod(shape[1:])), True, True)
    found = [dim for dim in range(ndim) if dim != batch and shape[dim] == tokens]
    if whole in shape and not found:
        return _order_without_tokens(shape, batch)
    if not found or (len(found) > 1 and ndim > 3):
        each = math.prod(shape) // (shape[batch] if batch is not None and shape[batch] else 1)
        if not found and (each == 1 or ndim < 3 or batch is None):
            return _order_without_tokens(shape, batch)
        what = (
            f"random numbers of shape {list(shape)}, where this rank has {tokens} of the {whole} tokens of each "
            "sequence,"
        )
        raise no_place(what, site)
    first = () if batch is None else (batch,)
    dims = (*first, found[0], *(dim for dim in range(ndim) if dim not in (*first, found[0])))
    count = shape[batch] if batch is not None else 1
    rest = [shape[dim] for dim in dims[len(first) + 1 :]]
    between = math.prod(rest[:-1])
    return Order(
        dims, (count, tokens, *([between] if between > 1 else []), *(rest[-1:] or [1])), batch is not None, True
    )


def _order_without_tokens(shape: torch.Size, batch: int | None) -> Order:
    dims = tuple(range(len(shape)))
    if batch is None:
        return Order(dims, (1, *shape), False)
    dims = (batch, *(dim for dim in dims if dim != batch))
    return Order(dims, tuple(shape[dim] for dim in dims), True)


def _batch_dim(shape: torch.Size, rows: int | None) -> int | None:
    """The dim of the rows, by itself or times something else; None: all rows have the same numbers."""
    if rows is None or not shape or shape[0] == rows:
        return 0 if shape and rows is not None else None
    if len(shape) > 2 and shape[1] == rows:  # [tokens, rows, ..]
        return 1
    if len(shape) > 1 and shape[0] > rows and shape[0] % rows == 0:
        return 0
    return 1 if len(shape) > 1 and shape[1] == rows else None


def place_of(
    key: Key,
    order: Order,
    layout: ActivationLayout,
    batch: tuple[int, int | None],
    tokens: int | None,
    local: LocalTokens | None,
    device: torch.device,
) -> DrawPlace:
    """The elements that this rank draws.

    Args:
        batch: (global row of the first batch row, rows). tokens: the full sequence length, of a sequence shard.
        local: the tokens of this rank, over `cp`.
    """
    shape = torch.Size(order.shape)
    rows = batch if order.has_rows else (0, None)
    if not order.by_token:
        local = None
        layout = ActivationLayout("full") if layout.kind == "sequence" else layout
    is_cut = local is not None or layout.kind != "full"
    return DrawPlace(key, order, *layout.global_index(shape, rows, tokens, device, local), is_cut, rows[0])


def no_place(what: str, site: str) -> ModelError:
    """The error for numbers that would depend on the mesh."""
    fix = (
        "draw them for whole sequences or rows, outside of column linears and sharded tokens; or use a mesh without "
        "this axis"
    )
    return ModelError(Problem("unplaceable-draw", f"{what} cannot be drawn as one process draws them", site, fix=fix))
