"""Operations on tensors that are stored by a layout give what they would give on the full tensors.

| operation | how |
| --- | --- |
| elementwise, copies, optimizer steps | on the local tensors: every operand is stored in the same order |
| norms and sums over all elements | on the local tensors; elements that several ranks store are counted once |
| random numbers | of the full tensor, as one process draws them with the generator of the first rank of tp |
| all others | on the full tensors, gathered; what was written in place is stored back |

A view of such a tensor is a copy, as the views of any DTensor along a sharded dim are.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor.layout_shard import LayoutShard, layout_group, local_pairs, store_like, unshard

aten = torch.ops.aten

_COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.copy_.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)
"""Operations that are elementwise in effect and not marked so by PyTorch."""

_ELEMENTWISE_ON_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
_REDUCES_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
_NORMS = frozenset({aten.linalg_vector_norm.default, aten._foreach_norm.Scalar})


def run(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation with at least one operand of the class `cls`."""
    if _is_elementwise(func):
        likes = _likes(cls, args, kwargs)
        if likes is not None:
            return _run_on_shards(cls, func, args, kwargs, likes)
    elif func is aten.sum.default or (func in _NORMS and _is_norm_of_all(args, kwargs)):
        return func(*private.tree_map(partial(_counted_once, cls), args), **kwargs)
    elif _is_random(func) and type(args[0]) is cls:
        return _draw(cls, func, args, kwargs)
    return _run_on_full(cls, func, args, kwargs)


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends on the same element of the operands alone."""
    if _is_random(func):
        return False
    name = func._schema.name.removeprefix("aten::")
    on_lists = name.startswith(_ELEMENTWISE_ON_LISTS) and not name.startswith(_REDUCES_LISTS)
    return on_lists or func in _COPIES or torch.Tag.pointwise in func.tags


# -- on the local tensors ----------------------------------------------------------------------------------------------


def _likes(cls: Any, args: Any, kwargs: Any) -> dict[int, Any] | None:
    """Position in its list (0 outside of lists) -> the tensor whose layout all operands there are stored by.

    None where operands at a position are broadcast to a larger shape, or share no shape.
    """
    likes: dict[int, Any] = {}
    for position, operand in _operands(args, kwargs):
        if type(operand) is cls:
            likes.setdefault(position, operand)
    for position, operand in _operands(args, kwargs):
        like = likes.get(position)
        if like is not None and not (operand.shape == like.shape or _is_broadcast(operand, like)):
            return None
    return likes


def _operands(args: Any, kwargs: Any) -> list[tuple[int, torch.Tensor]]:
    """(position in its list, tensor) of all operands; outside of lists the position is 0."""
    operands = []
    for argument in (*args, *kwargs.values()):
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        operands += [(i, value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    return operands


def _is_broadcast(operand: torch.Tensor, like: Any) -> bool:
    """Whether an operand is the same for all elements along the sharded dims, and has no more dims."""
    dims = [operand.ndim - like.ndim + dim for dim in like.tp_layout.sharded_dims]
    return operand.ndim <= like.ndim and all(dim < 0 or operand.shape[dim] == 1 for dim in dims)


def _run_on_shards(cls: Any, func: Any, args: Any, kwargs: Any, likes: dict[int, Any]) -> Any:
    originals: dict[int, Any] = {}  # id of a stored operand -> the operand itself, which in-place operations return

    def stored(argument: Any, position: int = 0) -> Any:
        if isinstance(argument, (list, tuple)):
            return [stored(value, i) for i, value in enumerate(argument)]
        like = likes.get(position)
        if like is None or not isinstance(argument, DTensor) or argument.shape != like.shape:
            return argument
        operand = _stored_like(cls, argument, like)
        originals[id(operand)] = (argument, operand)  # with the operand, whose id stays in use
        return operand

    def restored(result: Any, position: int = 0) -> Any:
        if isinstance(result, (list, tuple)):
            results = [restored(value, i) for i, value in enumerate(result)]
            return results if isinstance(result, list) else tuple(results)
        if id(result) in originals:
            return originals[id(result)][0]
        like = likes.get(position if position in likes else 0)
        return result if like is None or not isinstance(result, DTensor) else _with_layout_of(cls, result, like)

    return restored(func(*map(stored, args), **{key: stored(value) for key, value in kwargs.items()}))


def _stored_like(cls: Any, operand: Any, like: Any) -> DTensor:
    """A plain DTensor around an operand's shard, stored in the order of `like`."""
    spec = private.spec_of(operand)
    same_layout = type(operand) is cls and operand.tp_layout == like.tp_layout
    shows_layout = any(isinstance(p, LayoutShard) and p.layout == like.tp_layout for p in spec.placements)
    if (same_layout and spec.placements == private.spec_of(like).placements) or (shows_layout and spec.mesh.ndim == 1):
        local = private.local_of(operand)
    else:
        local = store_like(operand.full_tensor(), like.tp_layout, like)
    return private.wrap(local, private.with_dtype(private.spec_of(like), local))


def _with_layout_of(cls: Any, result: DTensor, like: Any) -> Any:
    if result.shape == like.shape:
        assert private.spec_of(result).placements == private.spec_of(like).placements, "an elementwise result was moved"
        result.__class__ = cls
        result.__dict__["tp_layout"] = like.tp_layout
    return result


# -- norms and sums ----------------------------------------------------------------------------------------------------


def _is_norm_of_all(args: Any, kwargs: Any) -> bool:
    """A norm over all dims whose order ignores zeros."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    return order > 0 and not dims


def _counted_once(cls: Any, operand: Any) -> Any:
    """A plain DTensor with zeros for padding, and for elements that an earlier rank of tp stores too."""
    if type(operand) is not cls:
        return operand
    local, spec = private.local_of(operand), private.spec_of(operand)
    pairs = local_pairs(operand, operand.tp_layout, layout_group(operand.device_mesh).rank)
    counted = [pair.local for pair, is_first in pairs if is_first]
    if sum(local[part].numel() for part in counted) != local.numel():
        full, local = local, torch.zeros_like(local)
        for part in counted:
            local[part] = full[part]
    return private.wrap(local, private.with_dtype(spec, local))


# -- on the full tensors -----------------------------------------------------------------------------------------------


def _run_on_full(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    fulls: dict[int, tuple[Any, DTensor]] = {}  # id of an operand -> the operand, and the full tensor in its place

    def gathered(operand: Any) -> Any:
        if type(operand) is not cls:
            return operand
        if id(operand) not in fulls:
            fulls[id(operand)] = (operand, _full(operand))
        return fulls[id(operand)][1]

    result = func(*private.tree_map(gathered, args), **private.tree_map(gathered, kwargs))
    if func._schema.is_mutable:
        for operand, full in fulls.values():
            _store_back(operand, private.local_of(full))
    originals = {id(full): operand for operand, full in fulls.values()}
    return private.tree_map(lambda value: originals.get(id(value), value), result)


def _draw(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """DTensors ignore a generator, and draw for each shard."""

    def plain(operand: Any) -> Any:
        return private.local_of(_full(operand)) if type(operand) is cls else operand

    like, full_args = args[0], private.tree_map(plain, args)
    drawn = func(*full_args, **kwargs)
    full = drawn if isinstance(drawn, torch.Tensor) else full_args[0]
    if not full.is_meta:
        layout_group(like.device_mesh).broadcast(full, 0)
    if func._schema.is_mutable:
        _store_back(like, full)
        return like
    local = store_like(full, like.tp_layout, like)
    return _with_layout_of(cls, private.wrap(local, private.with_dtype(private.spec_of(like), local)), like)


def _full(operand: Any) -> DTensor:
    """The full tensor, on every rank of the mesh."""
    local, mesh = private.local_of(operand), operand.device_mesh
    layout = operand.tp_layout
    full = local.new_empty(layout.shape) if local.is_meta else unshard(operand, layout, layout_group(mesh))
    return private.wrap(full, private.replicated_spec(mesh, full))


def _store_back(operand: Any, full: torch.Tensor) -> None:
    if full.shape != operand.shape:
        raise RuntimeError(f"an operation in place changed the shape of a sharded tensor to {list(full.shape)}")
    local = private.local_of(operand)
    if not local.is_meta:
        local.copy_(store_like(full, operand.tp_layout, operand))
