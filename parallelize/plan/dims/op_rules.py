"""Rules of operations: of those that change the shape of a tensor (views, permutations, slices, concatenations), and of
matmuls."""

from __future__ import annotations

from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.dims.factors import Dim, new_dim, regroup, size_of
from parallelize.plan.dims.record import Contraction, Dims, Record, Slice, line_of_model

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


# -- matmul rules ----------------------------------------------------------------------------------------------------
# Rules of operations that sum over a dim of two tensors: matmuls, attention, convolutions.


def _contract(record: Record, a: Dim, b: Dim, tensors: tuple[T, ...], name: str, rows: int = 0) -> None:
    dim = record.tie(a, b, name)
    names = [weight for tensor in tensors for weight in record.weights(tensor)]
    own = record.weight_of(record.module)
    if dim:
        # its input may be made of parameters too
        is_linear = any(record.weights(tensor) == {own} for tensor in tensors)
        weight = f"{record.module}.weight" if is_linear else names[0] if len(names) == 1 else ""
        record.contractions.append(Contraction(dim, weight, record.module, line_of_model(), rows))


def mm_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """mm, and addmm with a bias."""
    bias, (a, b) = (args[0], args[1:3]) if name in ("addmm", "addmv") else (None, args[:2])
    x, y = record.dims(a), record.dims(b)
    _contract(record, x[-1], y[0], (a, b), name, rows=a.numel() // a.shape[-1])
    dims = [*x[:-1], *y[1:]]
    if isinstance(bias, T):
        for index, dim in enumerate(reversed(record.dims(bias)), 1):
            dims[-index] = record.tie(dims[-index], dim, name)
    record.set(out, dims)


def bmm_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    a, b = args[1:3] if name == "baddbmm" else args[:2]
    x, y = record.dims(a), record.dims(b)
    _contract(record, x[2], y[1], (a, b), name)
    dims = [record.tie(x[0], y[0], name), x[1], y[2]]
    if name == "baddbmm":
        for index, dim in enumerate(reversed(record.dims(args[0])), 1):
            dims[-index] = record.tie(dims[-index], dim, name)
    record.set(out, dims)


def attention_rule(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """[batch, heads, queries, width] x [batch, key/value heads, keys, width]."""
    q, k, v = (record.dims(tensor) for tensor in args[:3])
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
    batch = record.tie(record.tie(q[0], k[0], name), v[0], name)
    heads = _tie_heads(record, q[1], record.tie(k[1], v[1], name))
    record.mix([record.tie(q[3], k[3], name), record.tie(k[2], v[2], name)], "attention over it")
    result = [batch, heads, q[2], v[3]]
    if isinstance(mask, T):
        for index, dim in enumerate(reversed(record.dims(mask)), 1):
            record.tie((batch, heads, q[2], k[2])[-index], dim, name)
    for index, tensor in enumerate(leaf for leaf in private.tree_leaves(out) if isinstance(leaf, T)):
        if index == 0:
            record.set(tensor, result)
        else:
            record.set(tensor, result[:3]) if tensor.ndim == 3 else record.fresh(tensor)


def _tie_heads(record: Record, heads: Dim, kv_heads: Dim) -> Dim:
    if size_of(heads) == size_of(kv_heads) or not kv_heads:
        return record.tie(heads, kv_heads, "attention")
    grouped = regroup(heads, [size_of(kv_heads), size_of(heads) // size_of(kv_heads)])
    if grouped is None:
        record.mix((heads, kv_heads), "attention of head counts that do not divide")
        return heads
    record.tie(grouped[0], kv_heads, "attention")
    record.repeats.append(grouped[1])
    return heads


def convolution_rule(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """Where each channel is convolved by itself it stays a channel, and a group of channels stays a group. Without
    groups the channels are summed over, as features are by a linear. Along a dim in which the kernel has size 1,
    nothing is needed."""
    x, weight = record.dims(args[0]), record.dims(args[1])
    bias = record.dims(args[2]) if isinstance(args[2], T) else [[]]
    record.fresh(out)
    dims = [x[0], *record.dims(out)[1:]]
    alone = {index for index in range(2, len(dims)) if _is_alone(args, index)}
    for index in alone:
        dims[index] = x[index]
    needed = [dim for side in (x, dims) for index, dim in enumerate(side) if index > 1 and index not in alone]
    if args[8] == args[0].shape[1] == out.shape[1] and not args[6]:
        dims[1] = record.tie(record.tie(x[1], weight[0], name), bias[0], name)
        needed += weight[1:]
    elif args[8] > 1 and not args[6] and (grouped := _groups(record, x[1], weight, args)):
        dims[1] = record.tie(weight[0], bias[0], name)
        needed += [grouped, *weight[1:]]
    elif args[8] == 1 and not args[6]:
        _contract(record, x[1], weight[1], (args[0], args[1]), "a convolution")
        dims[1] = record.tie(weight[0], bias[0], name)
        needed += weight[2:]
    else:
        needed += [x[1], dims[1], *weight, *bias]
    record.mix(needed, "a convolution")
    record.set(out, dims)


def _groups(record: Record, channels: Dim, weight: list[Dim], args: tuple) -> Dim | None:
    """The channels inside of a group, which are summed over; the groups are those of the results. None where factors do
    not fit."""
    groups = args[8]
    inputs = regroup(channels, [groups, args[0].shape[1] // groups])
    outputs = regroup(weight[0], [groups, args[1].shape[0] // groups])
    if inputs is None or outputs is None:
        return None
    record.tie(inputs[0], outputs[0], "a convolution")
    return record.tie(inputs[1], weight[1], "a convolution")


def _is_alone(args: tuple, index: int) -> bool:
    """Whether a convolution keeps the positions along a dim apart: a kernel of size 1, a stride of 1, no padding."""
    stride, padding = (values[min(index - 2, len(values) - 1)] for values in args[3:5])
    return args[1].shape[index] == 1 and stride == 1 and padding == 0 and not args[6]
