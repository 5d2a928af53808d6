"""What each operation does to dims: a rule by name for the operations of ATen that models use.

Pointwise operations, which PyTorch marks, tie the dims of their operands. What has no rule needs all of every dim of its
operands, as far as is known, so that they are left whole.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.dims.factors import new_dim, regroup
from parallelize.plan.dims.op_rules import (
    attention_rule,
    bmm_rule,
    cat_rule,
    convolution_rule,
    expand_rule,
    mm_rule,
    pad_rule,
    permute_rule,
    repeat_rule,
    select_rule,
    slice_rule,
    split_rule,
    squeeze_rule,
    stack_rule,
    unsqueeze_rule,
    view_rule,
)
from parallelize.plan.dims.record import Dims, Lookup, Record, Slice, line_of_model

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
    record.note(inputs, outputs, name, linear=rule in (mm_rule, bmm_rule, convolution_rule))


_DISTINCT = ("arange", "rand", "randn", "randint", "linspace", "eye", "tril_indices", "triu_indices")


def _unknown(record: Record, name: str, inputs: list[T], outputs: list[T]) -> None:
    for tensor in inputs:
        record.mix(record.dims(tensor), f"{name}, for which there is no rule", is_known=False)
    for tensor in outputs:
        if not any(tensor is x for x in inputs):
            record.fresh(tensor)
    record.unknown.setdefault(name, record.module)


# -- pointwise --------------------------------------------------------------------------------------------------------------  # noqa: E501


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


def _solve(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """X of A X = B, or of X A = B: batch dims are those of both, and the unknowns are needed together."""
    a, b = list(record.dims(args[0])), list(record.dims(args[1]))
    batch = [record.tie(x, y, name) for x, y in zip(a[:-2], b[:-2], strict=True)] if len(a) == len(b) else b[:-2]
    record.mix([*([] if len(a) == len(b) else [*a, *b]), *a[-2:], *b[-2:]], name)
    record.set(out, [*batch, *b[-2:]])


def _triangle(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    _same(record, name, args, kwargs, out)
    record.mix(record.dims(args[0])[-2:], name)


# -- along a dim -------------------------------------------------------------------------------------------------------------  # noqa: E501


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
    """Batch norm and group norm: each channel by itself, or each group of channels. Running statistics follow the channels."""  # noqa: E501
    dims = list(record.dims(args[0]))
    groups = args[6] if name == "native_group_norm" else 0
    for weight in args[1:3]:
        if isinstance(weight, T):
            dims[1] = record.tie(dims[1], record.dims(weight)[0], name)
    grouped = regroup(dims[1], [groups, args[0].shape[1] // groups]) if groups else [dims[1], []]
    record.mix([dims[0]] if not groups else [], "a batch norm")
    record.mix([grouped[1] if grouped else dims[1], *dims[2:]], "a norm over it")
    for index, result in enumerate(leaf for leaf in private.tree_leaves(out) if isinstance(leaf, T)):
        record.set(result, list(dims)) if index == 0 else record.fresh(result)


# -- by index -----------------------------------------------------------------------------------------------------------------  # noqa: E501


def _embedding(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    table, ids = record.dims(args[0]), record.dims(args[1])
    weights = sorted(record.weights(args[0]))
    record.lookups.append(Lookup(table[0], weights[0] if weights else "", record.are_ids(args[1]), record.module))
    record.set(out, [*ids, table[1]])


def _index_dim(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """index_select, gather: of one dim any elements are taken, the others stay."""
    dims = list(record.dims(args[0]))
    dim = args[1] % len(dims)
    record.mix([dims[dim]], name, is_known=not record.is_computed(args[2]))
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
    is_known = not any(record.is_computed(index) for index in tensors)  # of which each rank has those of its shard
    record.mix([dims[position] for position in used], "an index", is_known)
    if any(index.dtype == torch.bool for index in tensors) or used != list(range(used[0], used[-1] + 1)):
        record.mix(dims, "an index", is_known=False)
        record.fresh(out)
        return
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    chosen: Dims = [[] for _ in shape]
    for index in tensors:
        for offset, dim in enumerate(reversed(record.dims(index)), 1):
            chosen[-offset] = record.tie(chosen[-offset], dim, name)
    record.set(out, [*dims[: used[0]], *chosen, *dims[used[-1] + 1 :]])


def _write(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """scatter, index_put, ...: the result has the shape of the first operand. Dims that are not written by index may stay."""  # noqa: E501
    dims = record.dims(args[0])
    written = args[1] if len(args) > 1 else None
    tensors = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    is_known = not any(record.is_computed(x) for x in tensors if not x.is_floating_point())
    if isinstance(written, int):
        record.mix([dims[written % len(dims)]], name, is_known)
    elif isinstance(written, (list, tuple)):
        record.mix([dim for dim, index in zip(dims, written, strict=False) if index is not None], name, is_known)
    for tensor in tensors:
        record.mix(record.dims(tensor), name, is_known=False)
    record.set(out, list(dims))


def _pool(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Pooling and resizing: the dims after batch and channels are others afterwards."""
    x = record.dims(args[0])
    last = 1 if name.endswith("1d") or "linear1d" in name else 3 if name.endswith("3d") else 2
    start = len(x) - last
    record.mix(x[start:], "pooling" if "pool" in name else name)
    for result in private.tree_leaves(out):
        if isinstance(result, T):
            record.set(result, [*x[:start], *(new_dim(size) for size in result.shape[start:])])


def _copy(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    record.set(out, _broadcast(record, [args[0], args[1]], args[0], name))


def _made(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """A new tensor, of which no element depends on the operand."""
    record.fresh(out)


def _scalar(record: Record, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Reads a number, or nothing, of a tensor."""


def _rules() -> dict[str, Rule]:
    groups: dict[Rule, str] = {
        view_rule: "view _unsafe_view reshape _reshape_alias",
        expand_rule: "expand",
        repeat_rule: "repeat",
        permute_rule: "permute transpose t",
        unsqueeze_rule: "unsqueeze",
        squeeze_rule: "squeeze",
        select_rule: "select unbind",
        split_rule: "split split_with_sizes",
        slice_rule: "slice",
        gated_halves: "glu",
        cat_rule: "cat",
        stack_rule: "stack",
        complex_numbers: "view_as_complex view_as_real",
        pad_rule: "constant_pad_nd",
        _along: "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll",
        _reduce: "sum mean amax amin max min prod any all var std var_mean argmax argmin logsumexp linalg_vector_norm",
        _norm: "native_layer_norm _fused_rms_norm",
        _channel_norm: "native_group_norm native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit cudnn_batch_norm",  # noqa: E501
        mm_rule: "mm addmm mv addmv",
        bmm_rule: "bmm baddbmm",
        attention_rule: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "  # noqa: E501
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
        convolution_rule: "convolution",
        _embedding: "embedding",
        _index_dim: "index_select gather",
        _index: "index",
        _write: "scatter scatter_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_ index_add index_add_ slice_scatter select_scatter "  # noqa: E501
        "masked_scatter",
        _copy: "copy_",
        _pool: "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d max_pool2d_with_indices "  # noqa: E501
        "max_pool3d_with_indices upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
        _same: "clone detach alias lift_fresh _to_copy contiguous zeros_like ones_like full_like empty_like rand_like randn_like new_empty_strided "  # noqa: E501
        "native_dropout",
        _pointwise: "masked_fill_ floor_divide polar exponential_ uniform_ normal_ bernoulli_",
        _made: "new_empty new_zeros new_ones new_full",
        _solve: "linalg_solve_triangular",
        _triangle: "tril triu",
        _scalar: "_local_scalar_dense item equal is_nonzero _assert_async sym_size _assert_tensor_metadata",
    }
    return {name: rule for rule, names in groups.items() for name in names.split()}


# -- two parts -------------------------------------------------------------------------------------------------------
# Rules of operations that read two parts of a dim as one thing: complex numbers, gated linear units.


def complex_numbers(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """The last dim of real numbers, of size 2, is the two parts of complex ones."""
    dims = record.dims(args[0])
    real = [*dims, new_dim(2)] if name == "view_as_real" else dims
    record.mix(real[-1:], name)
    record.set(out, real if name == "view_as_real" else dims[:-1])


def gated_halves(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """The first half of a dim, times the sigmoid of the second half."""
    dims = list(record.dims(args[0]))
    dim = (args[1] if len(args) > 1 else -1) % len(dims)
    half, part = out.shape[dim], new_dim(out.shape[dim])
    line = line_of_model()
    record.slices += [Slice(dims[dim], start, start + half, part, record.module, line) for start in (0, half)]
    record.set(out, [*dims[:dim], part, *dims[dim + 1 :]])


RULES = _rules()
