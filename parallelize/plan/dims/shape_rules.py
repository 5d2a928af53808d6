"""Rules of operations that change the shape of a tensor: views, permutations, slices, concatenations."""

from __future__ import annotations

from typing import Any

import torch

from parallelize.plan.dims.factors import new_dim, regroup, size_of
from parallelize.plan.dims.record import Dims, Record, Slice, line_of_model

T = torch.Tensor


def view_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = record.dims(args[0])
    grouped = regroup([factor for dim in dims for factor in dim], list(out.shape))
    if grouped is None:
        record.mix(dims, f"{name} as {list(out.shape)}, which cuts across dims")
        record.fresh(out)
    else:
        record.set(out, grouped)


def expand_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    source = record.dims(args[0])
    padded: Dims = [[] for _ in range(out.ndim - len(source))] + list(source)
    dims = [dim or new_dim(size) for dim, size in zip(padded, out.shape, strict=True)]
    record.repeats += [dim for dim, before in zip(dims, padded, strict=True) if dim and not before]
    record.set(out, dims)


def repeat_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    source = record.dims(args[0])
    padded: Dims = [[] for _ in range(out.ndim - len(source))] + list(source)
    record.set(out, [new_dim(size // size_of(dim)) + dim for dim, size in zip(padded, out.shape, strict=True)])


def permute_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = record.dims(args[0])
    if name == "permute":
        order = [index % len(dims) for index in args[1]]
    else:
        order = list(range(len(dims)))
        a, b = (args[1] % len(dims), args[2] % len(dims)) if len(args) > 2 else (0, -1)
        if len(dims) > 1:
            order[a], order[b] = order[b], order[a]
    record.set(out, [dims[index] for index in order])


def unsqueeze_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = list(record.dims(args[0]))
    dims.insert(args[1] % out.ndim, [])
    record.set(out, dims)


def squeeze_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    sizes, dims = args[0].shape, record.dims(args[0])
    asked = args[1] if len(args) > 1 else range(len(dims))
    asked = [asked] if isinstance(asked, int) else asked
    dropped = {index % len(dims) for index in asked if dims} & {i for i, size in enumerate(sizes) if size == 1}
    record.set(out, [dim for index, dim in enumerate(dims) if index not in dropped])


def select_rule(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """One index of a dim, or each by itself."""
    dims = record.dims(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(dims)
    record.mix([dims[dim]], name)
    for result in out if isinstance(out, (tuple, list)) else (out,):
        record.set(result, dims[:dim] + dims[dim + 1 :])


def split_rule(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].ndim
    start = 0
    for result in out:
        _cut(record, args[0], result, dim, start)
        start += result.shape[dim]


def slice_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dim = (args[1] if len(args) > 1 else 0) % args[0].ndim
    start, step = (args[2] if len(args) > 2 else 0) or 0, args[4] if len(args) > 4 else 1
    size = args[0].shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    if step != 1:
        record.mix([record.dims(args[0])[dim]], "a slice with a step")
    _cut(record, args[0], out, dim, start)


def _cut(record: Record, source: T, result: T, dim: int, start: int) -> None:
    dims, size = record.dims(source), result.shape[dim]
    if size == source.shape[dim]:
        record.set(result, list(dims))
        return
    part = new_dim(size)
    record.slices.append(Slice(dims[dim], start, start + size, part, record.module, line_of_model()))
    record.set(result, [*dims[:dim], part, *dims[dim + 1 :]])


def cat_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    parts = [tensor for tensor in args[0] if tensor.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    if len(parts) == 1:
        record.set(out, list(record.dims(parts[0])))
        return
    dims = list(record.dims(parts[0]))
    for tensor in parts[1:]:
        dims = [
            a if index == dim else record.tie(a, b, name)
            for index, (a, b) in enumerate(zip(dims, record.dims(tensor), strict=True))
        ]
    dims[dim], start, line = new_dim(out.shape[dim]), 0, line_of_model()
    for tensor in parts:
        stop = start + tensor.shape[dim]
        record.slices.append(Slice(dims[dim], start, stop, record.dims(tensor)[dim], record.module, line, joined=True))
        start = stop
    record.set(out, dims)


def stack_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    dims = list(record.dims(args[0][0]))
    for tensor in args[0][1:]:
        dims = [record.tie(a, b, name) for a, b in zip(dims, record.dims(tensor), strict=True)]
    dims.insert(dim, new_dim(out.shape[dim]))
    record.mix([dims[dim]], name)
    record.set(out, dims)


def pad_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = list(record.dims(args[0]))
    widths = args[1]  # (before, after) of the last dim, of the one before it, ...
    for index in range(len(widths) // 2):
        if any(widths[2 * index : 2 * index + 2]):
            dim = len(dims) - 1 - index
            record.mix([dims[dim]], "padding")
            dims[dim] = new_dim(out.shape[dim])
            record.mix([dims[dim]], "padding")
    record.set(out, dims)
