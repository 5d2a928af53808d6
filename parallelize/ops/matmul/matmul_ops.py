"""The collective matmuls as dispatcher ops: schemas, kernels, fake kernels.

Each op is `F.linear` with a collective before or after it, on this rank's local tensors. `algorithm` is "sync",
"chunked/8" (8 chunks per shard) or "symm_mem". "auto/sync" is this rank's choice; then the group's first rank decides
for all. "auto" chooses by the sizes of the call, which compiled graphs do not know. Groups are identified by
`Group.key`.

    all_gather_linear       local rows -> all rows times this rank's weights, and the gathered rows
    linear_reduce_scatter   partial sums -> local rows of their sum
    linear_all_reduce       partial sums -> their sum
    column_linear           replicated input -> the input times this rank's weights; its gradient is all-reduced

The backward of each is another op, so that DTensor, simulation and compilers see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.comm.link_profile import LinearWork, choose, gather_work, reduce_work, scatter_work
from parallelize.comm.turns import takes_turns
from parallelize.ops.library import define, fake
from parallelize.ops.matmul import chunked_matmul, symmetric_memory
from parallelize.ops.matmul.chunked_matmul import MatmulSum, Thunk
from parallelize.ops.matmul.op_handshake import agree_on_first
from parallelize.ops.matmul.row_chunks import RowBox, RowGather, as_rows, flat, merged, take

T = torch.Tensor
_WGRAD_CHUNKS = 4  # chunks of a weight gradient that is computed between the steps of an all-reduce
_SYMM_MEM_STEPS = 4  # chunks per shard if symmetric memory has no kernel
_SAVE = {True: "gathered", False: "shard"}


def steps_of(algorithm: str) -> int:
    """Chunks per shard; 0 for no overlap. If symmetric memory has no kernel, the op runs in chunks over the same
    group."""
    kind, _, number = algorithm.partition("/")
    return int(number) if kind == "chunked" else _SYMM_MEM_STEPS if kind == "symm_mem" else 0


def _line(op: str, x: T, other: T, shape: Sequence[int], dim: int | None, *notes: str) -> str:
    """What the ranks must agree on: op, dtypes, the full shape of the rows that are sent, and notes."""
    sizes = [f"{size} over dim {dim}" if n == dim else str(size) for n, size in enumerate(shape)]
    dtypes = str(x.dtype) if x.dtype == other.dtype else f"{x.dtype} by {other.dtype}"
    return " ".join([op, dtypes, f"[{', '.join(sizes)}]", *notes])


def _decided(
    group: Group, x: T, algorithm: str, line: str, work: Callable[..., LinearWork], *sizes: int
) -> tuple[str, str]:
    """(the algorithm to use, the line that the ranks must still agree on). sizes: rows, inner and output features for
    `work`."""
    kind, _, choice = algorithm.partition("/")
    if takes_turns() and kind != "symm_mem":  # the other computation hides the messages: one for each peer is enough
        return "chunked/1", line
    if kind != "auto":
        return algorithm, f"{line} {algorithm}"
    if not choice:
        profile = group.profiles.get((x.device.type, x.dtype))
        choice = choose(work(*sizes, group.size, x.element_size()), profile).algorithm if profile else "sync"
    return agree_on_first(group, x.device, line, choice), ""


def _features(weights: list[T]) -> int:
    return sum(len(weight) for weight in weights)


def _gather(algorithm: str) -> Callable[..., Any]:
    if algorithm == "symm_mem":
        return symmetric_memory.all_gather_matmul
    return partial(chunked_matmul.all_gather_matmul, steps=steps_of(algorithm))


def _scatter(algorithm: str) -> Callable[..., Any]:
    if algorithm == "symm_mem":
        return symmetric_memory.matmul_reduce_scatter
    return partial(chunked_matmul.matmul_reduce_scatter, steps=steps_of(algorithm))


def _selected(grads: list[T], weights: list[T], weight_grads: list[bool]) -> list[tuple[T, T]]:
    """(output gradient, weight) of the weights whose gradient is needed."""
    return [(grad, weight) for grad, weight, need in zip(grads, weights, weight_grads, strict=True) if need]


def _optional_biases(biases: list[T], weights: list[T]) -> list[T | None]:
    """The schema has no optional tensors in lists: an empty tensor, or an empty list, means no bias."""
    return [bias if bias.numel() else None for bias in biases] or [None] * len(weights)


# -- kernels ----------------------------------------------------------------------------------------------------------


@define(
    "all_gather_linear(Tensor x, Tensor[] weights, Tensor[] biases, int dim, SymInt full, str group, str algorithm, "
    "bool keep) "
    "-> Tensor[]"
)
def _all_gather_linear(
    x: T, weights: list[T], biases: list[T], dim: int, full: int, group: Group, algorithm: str, keep: bool
) -> list[T]:
    """The outputs, and the gathered rows, or an empty tensor unless `keep`."""
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    line = _line("all_gather_linear", x, weights[0], shape, dim, f"save {_SAVE[keep]}")
    sizes = prod(shape[:-1]), x.shape[-1], _features(weights)
    algorithm, line = _decided(group, x, algorithm, line, gather_work, *sizes)
    rights = [weight.t() for weight in weights]
    outs, gathered = _gather(algorithm)(
        x, rights, _optional_biases(biases, weights), dim, full, group, line=line, keep=keep
    )
    return [*outs, gathered if keep else x.new_empty(0)]


@define(
    "all_gather_linear_backward(Tensor[] grads, Tensor? other, Tensor rows, Tensor[] weights, bool gathered, "
    "bool input_grad, bool[] weight_grads, int dim, SymInt full, str group, str algorithm) -> Tensor[]"
)
def _all_gather_linear_backward(
    grads: list[T],
    other: T | None,
    rows: T,
    weights: list[T],
    gathered: bool,
    input_grad: bool,
    weight_grads: list[bool],
    dim: int,
    full: int,
    group: Group,
    algorithm: str,
) -> list[T]:
    """[input gradient, if needed] and the weight gradients that are needed."""
    selected = _selected(grads, weights, weight_grads)
    results = [torch.empty_like(weight) for _, weight in selected]
    like = grads[0] if other is None else other
    line = _line("all_gather_linear_backward", like, rows, (*like.shape[:-1], rows.shape[-1]), dim)
    if input_grad or (selected and not gathered):
        sizes = prod(like.shape[:-1]), rows.shape[-1], _features(weights)
        algorithm, line = _decided(group, like, algorithm, line, gather_work, *sizes)

    def scatter(rows: T, works: list[Thunk]) -> list[T]:
        works = works + [
            partial(weight_gradient, grad, rows, out) for (grad, _), out in zip(selected, results, strict=True)
        ]
        if input_grad:
            total = MatmulSum(list(zip(grads, weights, strict=True)), other)
            return [_scatter(algorithm)(total, dim, group, meanwhile=works, line=line), *results]
        for work in works:
            work()
        return results

    if gathered or not selected:
        return scatter(rows, [])
    steps, gather_line = steps_of(algorithm), f"{line} save shard" if line else ""
    with RowGather(rows, dim, full, group, steps, line=gather_line, stream=2) as gather:
        if not steps:
            gather.finish()
        return scatter(gather.gathered, [gather.finish] if steps else [])


@define("linear_reduce_scatter(Tensor x, Tensor weight, int dim, str group, str algorithm) -> Tensor")
def _linear_reduce_scatter(x: T, weight: T, dim: int, group: Group, algorithm: str) -> T:
    line = _line("linear_reduce_scatter", x, weight, (*x.shape[:-1], len(weight)), dim)
    algorithm, line = _decided(group, x, algorithm, line, scatter_work, prod(x.shape[:-1]), x.shape[-1], len(weight))
    return _scatter(algorithm)(MatmulSum([(x, weight.t())]), dim, group, line=line)


@define(
    "linear_reduce_scatter_backward(Tensor grad, Tensor x, Tensor weight, bool input_grad, bool weight_grad, int dim, "
    "str group, str algorithm) -> Tensor[]"
)
def _linear_reduce_scatter_backward(
    grad: T, x: T, weight: T, input_grad: bool, weight_grad: bool, dim: int, group: Group, algorithm: str
) -> list[T]:
    """[input gradient, if needed], [weight gradient, if needed], and the gathered output gradient."""
    full = x.shape[dim]
    line = _line("linear_reduce_scatter_backward", grad, weight, (*x.shape[:-1], len(weight)), dim)
    algorithm, line = _decided(group, grad, algorithm, line, scatter_work, prod(x.shape[:-1]), x.shape[-1], len(weight))
    if not (input_grad and weight_grad and algorithm.startswith("chunked")):
        rights = [weight] if input_grad else []
        dxs, full_grad = _gather(algorithm)(grad, rights, [None] * len(rights), dim, full, group, line=line)
        return [*dxs, *([_weight_gradient_of(full_grad, x, weight)] if weight_grad else []), full_grad]
    dw = torch.empty_like(weight)
    waiting: dict[int, list[RowBox]] = {rank: [] for rank in range(group.size)}

    def add(rank: int, gathered: T, box: RowBox, remaining: int) -> None:
        """Add the contribution of rows to the weight gradient: local rows first, then each other rank's rows in two
        parts. The second part is the rank's last chunk, so that little is left to compute when everything has
        arrived."""
        waiting[rank].append(box)
        if remaining in (0, 1):
            for outer in merged(waiting[rank]):
                _add_rows(dw, take(as_rows(gathered, dim), outer), take(as_rows(x, dim), outer), rank == group.rank)
            waiting[rank].clear()

    (dx,), full_grad = chunked_matmul.all_gather_matmul(
        grad, [weight], [None], dim, full, group, steps=steps_of(algorithm), on_arrival=add, line=line
    )
    return [dx, dw, full_grad]


@define("linear_all_reduce(Tensor x, Tensor weight, str group, str algorithm) -> Tensor")
def _linear_all_reduce(x: T, weight: T, group: Group, algorithm: str) -> T:
    line = _line("linear_all_reduce", x, weight, (*x.shape[:-1], len(weight)), None)
    algorithm, line = _decided(group, x, algorithm, line, reduce_work, prod(x.shape[:-1]), x.shape[-1], len(weight))
    return chunked_matmul.matmul_all_reduce(MatmulSum([(x, weight.t())]), group, steps_of(algorithm), line=line)


@define("column_linear(Tensor x, Tensor[] weights, Tensor[] biases, str group, str algorithm) -> Tensor[]")
def _column_linear(x: T, weights: list[T], biases: list[T], group: Group, algorithm: str) -> list[T]:
    x = x if not weights or x.dtype == weights[0].dtype else x.to(weights[0].dtype)
    pairs = zip(weights, _optional_biases(biases, weights), strict=True)
    return [_without_view_mark(F.linear(x, weight, bias)) for weight, bias in pairs]


def _without_view_mark(x: T) -> T:
    """The same memory as a tensor of its own, to which a model may add in place: autograd refuses that on an op's
    view."""
    return torch.ops.aten._unsafe_view(x, x.shape)


@define(
    "column_linear_backward(Tensor[] grads, Tensor x, Tensor[] weights, bool[] weight_grads, str group, str "
    "algorithm) -> "
    "Tensor[]"
)
def _column_linear_backward(
    grads: list[T], x: T, weights: list[T], weight_grads: list[bool], group: Group, algorithm: str
) -> list[T]:
    """The input gradient, and the weight gradients that are needed."""
    selected = _selected(grads, weights, weight_grads)
    results = [torch.empty_like(weight) for _, weight in selected]
    works: list[Thunk] = []
    for (grad, weight), out in zip(selected, results, strict=True):
        for n in range(_WGRAD_CHUNKS):
            lo, hi = (weight.shape[0] * m // _WGRAD_CHUNKS for m in (n, n + 1))
            works.append(partial(weight_gradient, grad[..., lo:hi], x, out[lo:hi]))
    total = MatmulSum(list(zip(grads, weights, strict=True)))
    line = _line("column_linear_backward", grads[0], weights[0], x.shape, None)
    sizes = prod(x.shape[:-1]), _features(weights), x.shape[-1]  # of the input gradient
    algorithm, line = _decided(group, x, algorithm, line, reduce_work, *sizes)
    return [chunked_matmul.matmul_all_reduce(total, group, steps_of(algorithm), works, line), *results]


def _add_rows(dw: T, grad: T, rows: T, first: bool) -> None:
    """dw[N, K] = (if `first`) or += the contribution of these rows, both seen as [outer, rows, inner]."""
    features, inputs = dw.shape
    vectors = grad.numel() // max(1, features)
    left, right = grad.reshape(vectors, features), rows.reshape(vectors, inputs)
    if first:
        torch.mm(left.t(), right, out=dw)
    elif vectors:
        dw.addmm_(left.t(), right)


def weight_gradient(grad: T, rows: T, out: T) -> None:
    """out[N, K] = sum over rows of the outer product of grad[.., N] and rows[.., K]."""
    left, right = flat(grad), flat(rows)
    torch.mm(left.t(), right if right.dtype == left.dtype else right.to(left.dtype), out=out)


def _weight_gradient_of(grad: T, rows: T, weight: T) -> T:
    out = torch.empty_like(weight)
    weight_gradient(grad, rows, out)
    return out


# -- fake kernels: shapes on one rank ---------------------------------------------------------------------------------


@fake("all_gather_linear")
def _(
    x: T, weights: list[T], biases: list[T | None], dim: int, full: int, group: str, algorithm: str, keep: bool
) -> list[T]:
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    outs = [weight.new_empty((*shape[:-1], weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty(shape if keep else 0)]


@fake("all_gather_linear_backward")
def _(
    grads: list[T],
    other: T | None,
    rows: T,
    weights: list[T],
    gathered: T | None,
    input_grad: bool,
    weight_grads: list[bool],
    dim: int,
    full: int,
    group: str,
    algorithm: str,
) -> list[T]:
    dws = [torch.empty_like(weight) for weight, need in zip(weights, weight_grads, strict=True) if need]
    of_rows = grads[0] if grads else other
    return [_local_rows(of_rows, dim, rows.shape[-1], group), *dws] if input_grad and of_rows is not None else dws


@fake("linear_reduce_scatter")
def _(x: T, weight: T, dim: int, group: str, algorithm: str) -> T:
    return _local_rows(x, dim, weight.shape[0], group).to(weight.dtype)


@fake("linear_reduce_scatter_backward")
def _(grad: T, x: T, weight: T, input_grad: bool, weight_grad: bool, dim: int, group: str, algorithm: str) -> list[T]:
    full_grad = grad.new_empty((*x.shape[:-1], weight.shape[0]))
    dx = [grad.new_empty(x.shape)] if input_grad else []
    return [*dx, *([torch.empty_like(weight)] if weight_grad else []), full_grad]


@fake("linear_all_reduce")
def _(x: T, weight: T, group: str, algorithm: str) -> T:
    return weight.new_empty((*x.shape[:-1], weight.shape[0]))


@fake("column_linear")
def _(x: T, weights: list[T], biases: list[T | None], group: str, algorithm: str) -> list[T]:
    return [weight.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@fake("column_linear_backward")
def _(grads: list[T], x: T, weights: list[T], weight_grads: list[bool], group: str, algorithm: str) -> list[T]:
    dws = [torch.empty_like(weight) for weight, need in zip(weights, weight_grads, strict=True) if need]
    return [grads[0].new_empty(x.shape), *dws]


def _local_rows(like: T, dim: int, features: int, key: str) -> T:
    group = Group.by_key(key)
    start, stop = even_interval(like.shape[dim], group.size, group.rank)
    return like.new_empty((*like.shape[:dim], stop - start, *like.shape[dim + 1 : -1], features))
