"""What each operation does to dims: a rule by name for the operations of ATen that models use.

Pointwise operations, which PyTorch marks, tie the dims of their operands. What has no rule needs all of every dim of its
operands, as far as is known, so that they are left whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.dims.factors import Dim, new_dim, regroup, size_of
from parallelize.dims.record import Contraction, Dims, Lookup, Record, Slice
from parallelize.dims.two_parts import complex_numbers, gated_halves

T = torch.Tensor
Rule = Callable[[Record, str, tuple, dict, Any], None]


def apply_rule(record: Record, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """Record one operation and its result."""
    name = func.overloadpacket.__name__
    inputs = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    outputs = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, T)]
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _pointwise
    if rule is not None:
        rule(record, name, args, kwargs, out)
    elif inputs:
        _unknown(record, name, inputs, outputs)
    else:
        for tensor in outputs:
            record.fresh(tensor)
            if name in _DISTINCT:
                record.mix(record.dims(tensor), f"{name}, whose elements differ")
    record.note(inputs, outputs, name, linear=rule in (_mm, _bmm))


_DISTINCT = ("arange", "rand", "randn", "randint", "linspace", "eye", "tril_indices", "triu_indices")


def _unknown(record: Record, name: str, inputs: list[T], outputs: list[T]) -> None:
    for tensor in inputs:
        record.mix(record.dims(tensor), f"{name}, for which there is no rule")
    for tensor in outputs:
        if not any(tensor is x for x in inputs):
            record.fresh(tensor)
    record.unknown.setdefault(name, record.module)


# -- pointwise --------------------------------------------------------------------------------------------------------------


def _pointwise(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    tensors = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            record.set(result, _broadcast(record, tensors, result, name))


def _broadcast(record: Record, tensors: list[T], result: T, name: str) -> Dims:
    dims: Dims = [[] for _ in result.shape]
    for tensor in tensors:
        for index, dim in enumerate(reversed(record.dims(tensor)), 1):
            if index <= len(dims):
                dims[-index] = record.tie(dims[-index], dim, name)
    return dims


def _same(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """The result, or each result, has the dims of the first operand."""
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            record.set(result, list(record.dims(args[0])))


def _triangle(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    _same(record, name, args, kwargs, out)
    record.mix(record.dims(args[0])[-2:], name)


# -- shapes -----------------------------------------------------------------------------------------------------------------


def _view(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = record.dims(args[0])
    grouped = regroup([factor for dim in dims for factor in dim], list(out.shape))
    if grouped is None:
        record.mix(dims, f"{name} as {list(out.shape)}, which cuts across dims")
        record.fresh(out)
    else:
        record.set(out, grouped)


def _expand(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    source = record.dims(args[0])
    padded: Dims = [[] for _ in range(out.ndim - len(source))] + list(source)
    dims = [dim or new_dim(size) for dim, size in zip(padded, out.shape, strict=True)]
    record.repeats += [dim for dim, before in zip(dims, padded, strict=True) if dim and not before]
    record.set(out, dims)


def _repeat(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    source = record.dims(args[0])
    padded: Dims = [[] for _ in range(out.ndim - len(source))] + list(source)
    record.set(out, [new_dim(size // size_of(dim)) + dim for dim, size in zip(padded, out.shape, strict=True)])


def _permute(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = record.dims(args[0])
    if name == "permute":
        order = [index % len(dims) for index in args[1]]
    else:
        order = list(range(len(dims)))
        a, b = (args[1] % len(dims), args[2] % len(dims)) if len(args) > 2 else (0, -1)
        if len(dims) > 1:
            order[a], order[b] = order[b], order[a]
    record.set(out, [dims[index] for index in order])


def _unsqueeze(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = list(record.dims(args[0]))
    dims.insert(args[1] % out.ndim, [])
    record.set(out, dims)


def _squeeze(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    sizes, dims = args[0].shape, record.dims(args[0])
    asked = args[1] if len(args) > 1 else range(len(dims))
    asked = [asked] if isinstance(asked, int) else asked
    dropped = {index % len(dims) for index in asked if dims} & {i for i, size in enumerate(sizes) if size == 1}
    record.set(out, [dim for index, dim in enumerate(dims) if index not in dropped])


def _select(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """One index of a dim, or each by itself."""
    dims = record.dims(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(dims)
    record.mix([dims[dim]], name)
    for result in out if isinstance(out, (tuple, list)) else (out,):
        record.set(result, dims[:dim] + dims[dim + 1 :])


def _split(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].ndim
    start = 0
    for result in out:
        _cut(record, args[0], result, dim, start)
        start += result.shape[dim]


def _slice(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
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
    record.slices.append(Slice(dims[dim], start, start + size, part, record.module))
    record.set(result, [*dims[:dim], part, *dims[dim + 1 :]])


def _cat(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
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
    dims[dim] = new_dim(out.shape[dim])
    record.mix([dims[dim], *(record.dims(tensor)[dim] for tensor in parts)], "a concatenation along it")
    record.set(out, dims)


def _stack(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    dims = list(record.dims(args[0][0]))
    for tensor in args[0][1:]:
        dims = [record.tie(a, b, name) for a, b in zip(dims, record.dims(tensor), strict=True)]
    dims.insert(dim, new_dim(out.shape[dim]))
    record.mix([dims[dim]], name)
    record.set(out, dims)


def _pad(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    dims = list(record.dims(args[0]))
    for index, (before, after) in enumerate(zip(args[0].shape, out.shape, strict=True)):
        if before != after:
            record.mix([dims[index]], "padding")
            dims[index] = new_dim(after)
            record.mix([dims[index]], "padding")
    record.set(out, dims)


# -- along a dim -------------------------------------------------------------------------------------------------------------


def _along(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Operations that keep the shape and need all of one dim, or some dims: softmax, cumsum, sort, flip, ..."""
    dims = record.dims(args[0])
    asked = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("dims", -1))
    if name in ("roll",):
        asked = args[2] if len(args) > 2 else range(len(dims))
    if name in ("sort", "topk") and not (len(args) > 1 and name == "sort"):
        asked = args[2] if len(args) > 2 else -1
    indices = [asked] if isinstance(asked, int) else list(asked)
    indices = [index % len(dims) for index in indices if dims]
    record.mix([dims[index] for index in indices], name.strip("_"))
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            kept = [dim if a == b else new_dim(b) for dim, a, b in zip(dims, args[0].shape, result.shape, strict=True)]
            record.set(result, kept)


def _reduce(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Sums, means, norms, maxima."""
    dims = record.dims(args[0])
    asked = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if name == "linalg_vector_norm":
        asked = args[2] if len(args) > 2 else kwargs.get("dim")
    if asked is None or isinstance(asked, bool) or asked == []:
        asked = range(len(dims))
    indices = {index % len(dims) for index in ([asked] if isinstance(asked, int) else asked) if dims}
    record.mix([dims[index] for index in sorted(indices)], name)
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            kept = result.ndim == len(dims)
            rest = [([] if index in indices else dim) for index, dim in enumerate(dims) if kept or index not in indices]
            record.set(result, rest)


def _norm(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Layer norm and RMS norm over the last dims; weights follow the shape."""
    x, shape = args[0], args[1]
    dims = list(record.dims(x))
    for weight in args[2:4]:
        if isinstance(weight, T):
            for index, dim in enumerate(reversed(record.dims(weight)), 1):
                dims[-index] = record.tie(dims[-index], dim, name)
    record.mix(dims[len(dims) - len(shape) :], "a norm over it")
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            record.set(
                result, dims if result.shape == x.shape else [*dims[: -len(shape)], *[[] for _ in shape]][: result.ndim]
            )


def _channel_norm(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    dims = record.dims(args[0])
    record.mix(dims, name)
    for weight in args[1:]:
        if isinstance(weight, T):
            record.mix(record.dims(weight), name)
    for index, result in enumerate(leaf for leaf in private.tree_leaves(out) if isinstance(leaf, T)):
        record.set(result, list(dims)) if index == 0 else record.fresh(result)


# -- matmuls ------------------------------------------------------------------------------------------------------------------


def _contract(record: Record, a: Dim, b: Dim, tensors: tuple[T, ...], name: str) -> None:
    dim = record.tie(a, b, name)
    names = [weight for tensor in tensors for weight in record.weights(tensor)]
    if dim:
        record.contractions.append(Contraction(dim, names[0] if len(names) == 1 else "", record.module))


def _mm(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """mm, and addmm with a bias."""
    bias, (a, b) = (args[0], args[1:3]) if name in ("addmm", "addmv") else (None, args[:2])
    x, y = record.dims(a), record.dims(b)
    _contract(record, x[-1], y[0], (a, b), name)
    dims = [*x[:-1], *y[1:]]
    if isinstance(bias, T):
        for index, dim in enumerate(reversed(record.dims(bias)), 1):
            dims[-index] = record.tie(dims[-index], dim, name)
    record.set(out, dims)


def _bmm(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    a, b = args[1:3] if name == "baddbmm" else args[:2]
    x, y = record.dims(a), record.dims(b)
    _contract(record, x[2], y[1], (a, b), name)
    dims = [record.tie(x[0], y[0], name), x[1], y[2]]
    if name == "baddbmm":
        for index, dim in enumerate(reversed(record.dims(args[0])), 1):
            dims[-index] = record.tie(dims[-index], dim, name)
    record.set(out, dims)


def _attention(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
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


def _convolution(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    x, weight = record.dims(args[0]), record.dims(args[1])
    record.mix([*x[1:], *weight], "a convolution")
    if isinstance(args[2], T):
        record.mix(record.dims(args[2]), "a convolution")
    record.fresh(out)
    dims = record.dims(out)
    record.mix(dims[1:], "a convolution")
    record.set(out, [x[0], *dims[1:]])


# -- by index -----------------------------------------------------------------------------------------------------------------


def _embedding(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    table, ids = record.dims(args[0]), record.dims(args[1])
    weights = sorted(record.weights(args[0]))
    record.lookups.append(Lookup(table[0], weights[0] if weights else "", record.are_ids(args[1])))
    record.set(out, [*ids, table[1]])


def _index_dim(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """index_select, gather: of one dim any elements are taken, the others stay."""
    dims = list(record.dims(args[0]))
    dim = args[1] % len(dims)
    record.mix([dims[dim]], name)
    if name == "gather":
        index = record.dims(args[2])
        dims = [
            record.tie(a, b, name) if i != dim and args[0].shape[i] == out.shape[i] else b
            for i, (a, b) in enumerate(zip(dims, index, strict=True))
        ]
    else:
        dims[dim] = record.dims(args[2])[0] if args[2].ndim else []
    record.set(out, dims)


def _index(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """x[i, j, ...] by tensors: the indexed dims become those of the indices, where they follow one another."""
    dims, indices = record.dims(args[0]), list(args[1])
    used = [position for position, index in enumerate(indices) if index is not None]
    tensors = [indices[position] for position in used]
    record.mix([dims[position] for position in used], "an index")
    if any(index.dtype == torch.bool for index in tensors) or used != list(range(used[0], used[-1] + 1)):
        record.mix(dims, "an index")
        record.fresh(out)
        return
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    chosen: Dims = [[] for _ in shape]
    for index in tensors:
        for offset, dim in enumerate(reversed(record.dims(index)), 1):
            chosen[-offset] = record.tie(chosen[-offset], dim, name)
    record.set(out, [*dims[: used[0]], *chosen, *dims[used[-1] + 1 :]])


def _write(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """scatter, index_put, ...: the result has the shape of the first operand, whose dims are all needed."""
    for tensor in (leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)):
        record.mix(record.dims(tensor), name)
    record.set(out, list(record.dims(args[0])))


def _copy(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    record.set(out, _broadcast(record, [args[0], args[1]], args[0], name))


def _made(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """A new tensor, of which no element depends on the operand."""
    record.fresh(out)


def _scalar(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Reads a number, or nothing, of a tensor."""


def _rules() -> dict[str, Rule]:
    groups: dict[Rule, str] = {
        _view: "view _unsafe_view reshape _reshape_alias",
        _expand: "expand",
        _repeat: "repeat",
        _permute: "permute transpose t",
        _unsqueeze: "unsqueeze",
        _squeeze: "squeeze",
        _select: "select unbind",
        _split: "split split_with_sizes",
        _slice: "slice",
        gated_halves: "glu",
        _cat: "cat",
        _stack: "stack",
        complex_numbers: "view_as_complex view_as_real",
        _pad: "constant_pad_nd",
        _along: "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll",
        _reduce: "sum mean amax amin max min prod any all var std var_mean argmax argmin logsumexp linalg_vector_norm",
        _norm: "native_layer_norm _fused_rms_norm",
        _channel_norm: "native_group_norm native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit cudnn_batch_norm",
        _mm: "mm addmm mv addmv",
        _bmm: "bmm baddbmm",
        _attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
        _convolution: "convolution",
        _embedding: "embedding",
        _index_dim: "index_select gather",
        _index: "index",
        _write: "scatter scatter_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_ index_add index_add_ slice_scatter select_scatter "
        "masked_scatter",
        _copy: "copy_",
        _same: "clone detach alias lift_fresh _to_copy contiguous zeros_like ones_like full_like empty_like rand_like randn_like new_empty_strided "
        "native_dropout",
        _made: "new_empty new_zeros new_ones new_full",
        _triangle: "tril triu",
        _scalar: "_local_scalar_dense item equal is_nonzero _assert_async sym_size _assert_tensor_metadata",
    }
    return {name: rule for rule, names in groups.items() for name in names.split()}


RULES = _rules()
