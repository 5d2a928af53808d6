"""Tensors without data that record the source of their elements, to find out what a conversion of transformers moves.

Boxes of elements are traced through the ops that map boxes to boxes: stacking, concatenating, splitting, slicing,
permuting dims. The result of any other op records only the names of its source tensors. `hf_conversions.py` runs the
conversions of transformers on these tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from parallelize.base.boxes import Part, full_part
from parallelize.base.torch_private.torch_tensors import tree_leaves, tree_map, written_tensors

aten = torch.ops.aten


class WritesInPlaceError(Exception):
    """An op wrote into a traced tensor. Its other views would not see that."""


class Traced(torch.Tensor):
    """A tensor on the meta device.

    Attributes:
        parts: boxes that cover it, with their sources. None if an op did not map boxes to boxes.
        sources: names of its source tensors, in order.
        op: if `parts` is None, the op that caused it: the class of a conversion of transformers, or an op of torch.
    """

    parts: tuple[Part, ...] | None
    sources: tuple[str, ...]
    op: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without its `func` in torch 2.13
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(True for _ in written_tensors(func, args, kwargs)):
            raise WritesInPlaceError(f"{func} writes in place")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        rule = RULES.get(func)
        if rule is not None and all(isinstance(x, Traced) and x.parts is not None for x in inputs):
            result = rule(*args, **kwargs)
            if result is not None:
                return result
        return _opaque(func, inputs, args, kwargs)


def named(name: str, shape: Sequence[int]) -> Traced:
    """The traced tensor of a source tensor."""
    return _traced(shape, (full_part(name, shape),), (name,))


def _traced(shape: Sequence[int], parts: tuple[Part, ...] | None, sources: Iterable[str], op: str = "") -> Traced:
    tensor = torch.empty(tuple(shape), device="meta").as_subclass(Traced)
    tensor.parts, tensor.sources, tensor.op = parts, tuple(dict.fromkeys(sources)), op
    return tensor


def _traced_from_parts(shape: Sequence[int], parts: Iterable[Part]) -> Traced:
    parts = tuple(parts)
    return _traced(shape, parts, (part.source for part in parts))


def _opaque(func: Any, inputs: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
    """Run an op on meta tensors. The results have its shapes, the names of all its inputs, and no parts."""
    traced = [x for x in inputs if isinstance(x, Traced)]
    op = next((x.op for x in traced if x.parts is None), "") or _running_conversion() or str(func)
    sources = [name for x in traced for name in x.sources]

    def plain(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value

    def opaque(value: Any) -> Any:
        return _traced(value.shape, None, sources, op) if isinstance(value, torch.Tensor) else value

    return tree_map(opaque, func(*tree_map(plain, args), **tree_map(plain, kwargs)))


def _running_conversion() -> str:
    """The class whose method `convert` is on the stack: the operation that transformers is running. Empty if none
    is."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "convert" and "self" in frame.f_locals:
            return type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return ""


def _dim(x: torch.Tensor, dim: int) -> int:
    return dim % max(x.dim(), 1)


def _same(x: Traced, **_: Any) -> Traced:
    """The same elements as a new tensor. PyTorch refuses a view op that returns its input."""
    return _traced_from_parts(x.shape, x.parts or ())


def _view(x: Traced, shape: Sequence[int]) -> Traced | None:
    return _same(x) if tuple(shape) == tuple(x.shape) else None


def _take(x: Traced, dim: int, start: int, stop: int) -> Traced:
    """x[start:stop] along `dim`."""
    parts = []
    for part in x.parts or ():
        low, high = part.target[dim]
        first, last = max(low, start), min(high, stop)
        if first >= last:
            continue
        target = (*part.target[:dim], (first - start, last - start), *part.target[dim + 1 :])
        pairs = zip(part.source_start, part.dims, strict=True)
        begin = tuple(at + (first - low if part_dim == dim else 0) for at, part_dim in pairs)
        parts.append(replace(part, target=target, source_start=begin))
    return _traced_from_parts((*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), parts)


def _drop(x: Traced, dim: int) -> Traced:
    """Remove a dim of extent 1. Dims of the source that correspond to it then correspond to none."""

    def target_dim(dim_before: int | None) -> int | None:
        return None if dim_before is None or dim_before == dim else dim_before - (dim_before > dim)

    return _traced_from_parts(
        (*x.shape[:dim], *x.shape[dim + 1 :]),
        (
            replace(part, target=(*part.target[:dim], *part.target[dim + 1 :]), dims=tuple(map(target_dim, part.dims)))
            for part in x.parts or ()
        ),
    )


def _unsqueeze(x: Traced, dim: int) -> Traced:
    dim = dim % (x.dim() + 1)

    def target_dim(dim_before: int | None) -> int | None:
        return dim_before if dim_before is None else dim_before + (dim_before >= dim)

    return _traced_from_parts(
        (*x.shape[:dim], 1, *x.shape[dim:]),
        (
            replace(
                part, target=(*part.target[:dim], (0, 1), *part.target[dim:]), dims=tuple(map(target_dim, part.dims))
            )
            for part in x.parts or ()
        ),
    )


def _permute(x: Traced, dims: Sequence[int]) -> Traced:
    dims = [_dim(x, dim) for dim in dims]
    new_dim = {old: new for new, old in enumerate(dims)}

    def target_dim(dim_before: int | None) -> int | None:
        return None if dim_before is None else new_dim[dim_before]

    return _traced_from_parts(
        [x.shape[dim] for dim in dims],
        (
            replace(part, target=tuple(part.target[dim] for dim in dims), dims=tuple(map(target_dim, part.dims)))
            for part in x.parts or ()
        ),
    )


def _transpose(x: Traced, dim0: int, dim1: int) -> Traced:
    dims = list(range(x.dim()))
    dim0, dim1 = _dim(x, dim0), _dim(x, dim1)
    dims[dim0], dims[dim1] = dim1, dim0
    return _permute(x, dims)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced | None:
    first = tensors[0]
    dim = _dim(first, dim)
    other_sizes = [(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors]
    if not first.dim() or any(x.dim() != first.dim() for x in tensors) or len(set(other_sizes)) > 1:
        return None
    parts, end = [], 0
    for x in tensors:
        for part in x.parts or ():
            low, high = part.target[dim]
            target = (*part.target[:dim], (low + end, high + end), *part.target[dim + 1 :])
            parts.append(replace(part, target=target))
        end += x.shape[dim]
    return _traced_from_parts((*first.shape[:dim], end, *first.shape[dim + 1 :]), parts)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced | None:
    dim = dim % (tensors[0].dim() + 1)
    same = len({tuple(x.shape) for x in tensors}) == 1
    return _cat([_unsqueeze(x, dim) for x in tensors], dim) if same else None


def _split(x: Traced, size: int, dim: int = 0) -> list[Traced] | None:
    dim = _dim(x, dim)
    extent = x.shape[dim]
    if size <= 0:
        return None
    return [_take(x, dim, at, min(at + size, extent)) for at in range(0, max(extent, 1), size)]


def _split_with_sizes(x: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced] | None:
    dim = _dim(x, dim)
    if sum(sizes) != x.shape[dim]:
        return None
    ends = list(accumulate(sizes))
    return [_take(x, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _slice(x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Traced | None:
    dim = _dim(x, dim)
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _take(x, dim, first, max(first, last)) if step == 1 else None


def _select(x: Traced, dim: int, index: int) -> Traced:
    dim = _dim(x, dim)
    index = index % x.shape[dim]
    return _drop(_take(x, dim, index, index + 1), dim)


def _squeeze(x: Traced, dim: int) -> Traced:
    dim = _dim(x, dim)
    return _drop(x, dim) if x.dim() and x.shape[dim] == 1 else _same(x)


def _unbind(x: Traced, dim: int = 0) -> list[Traced]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


RULES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dim: _squeeze,
    aten.stack.default: _stack,
    aten.t.default: lambda x: _transpose(x, 0, 1) if x.dim() == 2 else _same(x),
    aten.transpose.int: _transpose,
    aten.unbind.int: _unbind,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
}
"""Op -> function that traces boxes through it. The function returns None if the op does not map boxes to boxes."""
