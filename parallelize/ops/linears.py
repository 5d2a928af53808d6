"""The collective matmuls as dispatcher ops: schemas, kernels, fake kernels, autograd.

Each op is `F.linear` with a collective before or after it, on this rank's local tensors. A `way` says how it is done:
"sync", "chunked/8" (8 pieces a shard), "symm_mem"; "auto/sync" is this rank's choice, and the first rank's is taken. Groups
are named by `Group.key`.

    all_gather_linear       own rows -> products of all rows with this rank's weights, and the gathered rows
    linear_reduce_scatter   partial products -> own rows of their sum
    linear_all_reduce       partial products -> their sum
    column_linear           replicated input -> products with this rank's weights; the gradient is all-reduced

Backward of each is one more op, so that DTensor, simulation and compilers see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from parallelize.groups import Group
from parallelize.layout import even_interval
from parallelize.ops import pipeline, symmetric
from parallelize.ops.agreement import agree_on_first
from parallelize.ops.library import define, fake
from parallelize.ops.pipeline import Sum, Thunk
from parallelize.ops.shards import Box, as_rows, flat, merged, take

T = torch.Tensor
_WGRAD_PIECES = 4  # a weight gradient beside a two-phase reduction is computed in so many runs of its rows


def steps_of(way: str) -> int:
    """Pieces a shard; 0 for no overlap. What symmetric memory has no kernel for is done in pieces over the same group."""
    kind, _, number = way.partition("/")
    return int(number) if kind == "chunked" else 4 if kind == "symm_mem" else 0


def _line(op: str, x: T, other: T, whole: Sequence[int], dim: int | None, *notes: str) -> str:
    """What the ranks must agree on: op, dtypes, the whole shape of the rows that travel, and how."""
    shown = [f"{size} over dim {dim}" if n == dim else str(size) for n, size in enumerate(whole)]
    dtypes = str(x.dtype) if x.dtype == other.dtype else f"{x.dtype} by {other.dtype}"
    return " ".join([op, dtypes, f"[{', '.join(shown)}]", *notes])


def _settled(team: Group, x: T, way: str, line: str) -> tuple[str, str]:
    """(the way to go, the line that is still to be agreed on)."""
    kind, _, own = way.partition("/")
    if kind != "auto":
        return way, f"{line} {way}"
    return agree_on_first(team, x.device, line, own), ""


def _gather(way: str) -> Callable:
    return symmetric.gather_products if way == "symm_mem" else partial(pipeline.gather_products, steps=steps_of(way))


def _scatter(way: str) -> Callable:
    return symmetric.scatter_products if way == "symm_mem" else partial(pipeline.scatter_products, steps=steps_of(way))


# -- kernels ----------------------------------------------------------------------------------------------------------


@define(
    "all_gather_linear(Tensor x, Tensor[] weights, Tensor[] biases, int dim, SymInt full, str group, str way, bool keep) "
    "-> Tensor[]"
)
def _all_gather_linear(
    x: T, weights: list[T], biases: list[T], dim: int, full: int, team: Group, way: str, keep: bool
) -> list[T]:
    """The products, and the gathered rows, or nothing in their place unless they are to be kept."""
    given = [bias if bias.numel() else None for bias in biases] or [None] * len(weights)
    whole = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    line = _line("all_gather_linear", x, weights[0], whole, dim, f"save {_SAVE[keep]}")
    way, line = _settled(team, x, way, line)
    rights = [weight.t() for weight in weights]
    outs, gathered = _gather(way)(x, rights, given, dim, full, team, line=line, keep=keep)
    return [*outs, gathered if keep else x.new_empty(0)]


_SAVE = {True: "gathered", False: "shard"}


@define(
    "all_gather_linear_backward(Tensor[] grads, Tensor? other, Tensor rows, Tensor[] weights, bool gathered, "
    "bool input_grad, bool[] weight_grads, int dim, SymInt full, str group, str way) -> Tensor[]"
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
    team: Group,
    way: str,
) -> list[T]:
    """[input gradient, if wanted] and the weight gradients that are."""
    wanted = [(grad, weight) for grad, weight, want in zip(grads, weights, weight_grads, strict=True) if want]
    results = [torch.empty_like(weight) for _, weight in wanted]
    like = grads[0] if other is None else other
    line = _line("all_gather_linear_backward", like, rows, (*like.shape[:-1], rows.shape[-1]), dim)
    if input_grad or (wanted and not gathered):
        way, line = _settled(team, like, way, line)

    def scatter(rows: T, works: list[Thunk]) -> list[T]:
        works = works + [
            partial(weight_gradient, grad, rows, out) for (grad, _), out in zip(wanted, results, strict=True)
        ]
        if input_grad:
            total = Sum(list(zip(grads, weights, strict=True)), other)
            return [_scatter(way)(total, dim, team, meanwhile=works, line=line), *results]
        for work in works:
            work()
        return results

    if gathered or not wanted:
        return scatter(rows, [])
    with pipeline.Gather(rows, dim, full, team, steps_of(way), line and f"{line} save shard", stream=2) as gather:
        if not steps_of(way):
            gather.finish()
        return scatter(gather.gathered, [gather.finish] if steps_of(way) else [])


@define("linear_reduce_scatter(Tensor x, Tensor weight, int dim, str group, str way) -> Tensor")
def _linear_reduce_scatter(x: T, weight: T, dim: int, team: Group, way: str) -> T:
    way, line = _settled(team, x, way, _line("linear_reduce_scatter", x, weight, (*x.shape[:-1], len(weight)), dim))
    return _scatter(way)(Sum([(x, weight.t())]), dim, team, line=line)


@define(
    "linear_reduce_scatter_backward(Tensor grad, Tensor x, Tensor weight, bool input_grad, bool weight_grad, int dim, "
    "str group, str way) -> Tensor[]"
)
def _linear_reduce_scatter_backward(
    grad: T, x: T, weight: T, input_grad: bool, weight_grad: bool, dim: int, team: Group, way: str
) -> list[T]:
    """[input gradient, if wanted], [weight gradient, if wanted], and the gathered output gradient."""
    full = x.shape[dim]
    line = _line("linear_reduce_scatter_backward", grad, weight, (*x.shape[:-1], len(weight)), dim)
    way, line = _settled(team, grad, way, line)
    if not (input_grad and weight_grad and way.startswith("chunked")):
        rights = [weight] if input_grad else []
        dxs, whole = _gather(way)(grad, rights, [None] * len(rights), dim, full, team, line=line)
        return [*dxs, *([_weight_gradient_of(whole, x, weight)] if weight_grad else []), whole]
    dw = torch.empty_like(weight)
    waiting: dict[int, list[Box]] = {rank: [] for rank in range(team.size)}

    def add(rank: int, gathered: T, box: Box, left: int) -> None:
        """The part of the weight gradient that rows make: own rows first, then each rank's in two parts, of which the
        second is its last piece, so that little is left to do when all has come."""
        waiting[rank].append(box)
        if left in (0, 1):
            for outer in merged(waiting[rank]):
                _add_rows(dw, take(as_rows(gathered, dim), outer), take(as_rows(x, dim), outer), rank == team.rank)
            waiting[rank].clear()

    (dx,), whole = pipeline.gather_products(grad, [weight], [None], dim, full, team, steps_of(way), add, line)
    return [dx, dw, whole]


@define("linear_all_reduce(Tensor x, Tensor weight, str group, str way) -> Tensor")
def _linear_all_reduce(x: T, weight: T, team: Group, way: str) -> T:
    way, line = _settled(team, x, way, _line("linear_all_reduce", x, weight, (*x.shape[:-1], len(weight)), None))
    return pipeline.reduce_products(Sum([(x, weight.t())]), team, steps_of(way), line=line)


@define("column_linear(Tensor x, Tensor[] weights, Tensor[] biases, str group, str way) -> Tensor[]")
def _column_linear(x: T, weights: list[T], biases: list[T], team: Group, way: str) -> list[T]:
    x = x if not weights or x.dtype == weights[0].dtype else x.to(weights[0].dtype)
    given = [bias if bias.numel() else None for bias in biases] or [None] * len(weights)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True)]


@define(
    "column_linear_backward(Tensor[] grads, Tensor x, Tensor[] weights, bool[] weight_grads, str group, str way) -> "
    "Tensor[]"
)
def _column_linear_backward(
    grads: list[T], x: T, weights: list[T], weight_grads: list[bool], team: Group, way: str
) -> list[T]:
    """The input gradient, and the weight gradients that are wanted."""
    wanted = [(grad, weight) for grad, weight, want in zip(grads, weights, weight_grads, strict=True) if want]
    results = [torch.empty_like(weight) for _, weight in wanted]
    works: list[Thunk] = []
    for (grad, weight), out in zip(wanted, results, strict=True):
        for n in range(_WGRAD_PIECES):
            lo, hi = (weight.shape[0] * m // _WGRAD_PIECES for m in (n, n + 1))
            works.append(partial(weight_gradient, grad[..., lo:hi], x, out[lo:hi]))
    total = Sum(list(zip(grads, weights, strict=True)))
    way, line = _settled(team, x, way, _line("column_linear_backward", grads[0], weights[0], x.shape, None))
    return [pipeline.reduce_products(total, team, steps_of(way), works, line), *results]


def _add_rows(dw: T, grad: T, rows: T, first: bool) -> None:
    """dw[N, K] = or += what these rows contribute, both seen as [outer, rows, inner]."""
    features, inputs = dw.shape
    vectors = grad.numel() // max(1, features)
    left, right = grad.reshape(vectors, features), rows.reshape(vectors, inputs)
    if first:
        torch.mm(left.t(), right, out=dw)
    elif vectors:
        dw.addmm_(left.t(), right)


def weight_gradient(grad: T, rows: T, out: T) -> None:
    """out[N, K] = sum over rows of grad[.., N] x rows[.., K]."""
    left, right = flat(grad), flat(rows)
    torch.mm(left.t(), right if right.dtype == left.dtype else right.to(left.dtype), out=out)


def _weight_gradient_of(grad: T, rows: T, weight: T) -> T:
    out = torch.empty_like(weight)
    weight_gradient(grad, rows, out)
    return out


# -- fake kernels: shapes on one rank ---------------------------------------------------------------------------------


@fake("all_gather_linear")
def _(x, weights, biases, dim, full, group, way, keep):
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    outs = [weight.new_empty((*shape[:-1], weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty(shape if keep else 0)]


@fake("all_gather_linear_backward")
def _(grads, other, rows, weights, gathered, input_grad, weight_grads, dim, full, group, way):
    dws = [torch.empty_like(weight) for weight, want in zip(weights, weight_grads, strict=True) if want]
    return [_own_rows(grads[0] if grads else other, dim, rows.shape[-1], group), *dws] if input_grad else dws


@fake("linear_reduce_scatter")
def _(x, weight, dim, group, way):
    return _own_rows(x, dim, weight.shape[0], group).to(weight.dtype)


@fake("linear_reduce_scatter_backward")
def _(grad, x, weight, input_grad, weight_grad, dim, group, way):
    whole = grad.new_empty((*x.shape[:-1], weight.shape[0]))
    dx = [grad.new_empty(x.shape)] if input_grad else []
    return [*dx, *([torch.empty_like(weight)] if weight_grad else []), whole]


@fake("linear_all_reduce")
def _(x, weight, group, way):
    return weight.new_empty((*x.shape[:-1], weight.shape[0]))


@fake("column_linear")
def _(x, weights, biases, group, way):
    return [weight.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@fake("column_linear_backward")
def _(grads, x, weights, weight_grads, group, way):
    dws = [torch.empty_like(weight) for weight, want in zip(weights, weight_grads, strict=True) if want]
    return [grads[0].new_empty(x.shape), *dws]


def _own_rows(like: T, dim: int, features: int, group: str) -> T:
    team = Group.by_key(group)
    start, stop = even_interval(like.shape[dim], team.size, team.rank)
    return like.new_empty((*like.shape[:dim], stop - start, *like.shape[dim + 1 : -1], features))
