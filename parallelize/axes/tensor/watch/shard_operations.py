"""What operations do along the dim that is a shard: which ones need all of it, and which dim of their result is the
shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallelize.axes.tensor.watch.shard_dims import ShardDim, broadcasts, removed
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor

_OVER_ALL = "all dims"
_REDUCTIONS = {  # name: position of `dim` among the arguments; without it they reduce over all dims
    **dict.fromkeys(("mean", "sum", "amax", "amin", "argmax", "argmin", "std", "var", "prod", "max", "min"), 1),
    **dict.fromkeys(("median", "nanmean", "nansum", "logsumexp", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), 2),
}
_ALONG = {  # name: (position of `dim`, its default)
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), (1, None)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip"), (1, None)),
    **dict.fromkeys(("sort", "argsort", "glu", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "diff"), (2, -1)),
    "kthvalue": (2, -1),
    "normalize": (2, 1),
    "roll": (2, _OVER_ALL),
    "unfold": (1, None),
}
_PARTS = {  # name: (position of `dim`, its default)
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), (2, 0)),
    **dict.fromkeys(("narrow", "select"), (1, None)),
    "unbind": (1, 0),
}
_PICKS = {"index_select": 1, "gather": 1, "take_along_dim": 2, "scatter": 1, "index_add": 1, "index_copy": 1}
_VIEWS = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "_unsafe_view"))
_SPATIAL = ("_pool1d", "_pool2d", "interpolate", "instance_norm", "group_norm")


@dataclass(frozen=True)
class Call:
    """A call of a function with a shard among its arguments.

    Attributes:
        name: of the function; of the operator for `x[...]` and properties.
        args, kwargs: as it was called.
        shards: gives the shard dim of a tensor, or None.
        is_derived: whether a tensor was computed from shards, so that its indices count from the beginning of a shard.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shards: Callable[[Any], ShardDim | None]
    is_derived: Callable[[Any], bool]

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def sharded(self) -> Iterator[tuple[T, ShardDim]]:
        """The arguments that are shards."""
        for leaf in private.tree_leaves((self.args, dict(self.kwargs))):
            shard = self.shards(leaf) if isinstance(leaf, T) else None
            if shard is not None:
                yield leaf, shard

    @property
    def base(self) -> str:
        """The name without the underscore of an operation in place."""
        return self.name.rstrip("_") if not self.name.startswith("_") else self.name

    def dims(self, x: T) -> tuple[int, ...] | None:
        """The dims that this function works along, all negative; None: not such a function."""
        name = self.base
        default: Any
        if name in ("max", "min") and isinstance(self.argument(1, "other"), T):
            return None
        if name in _REDUCTIONS:
            position, default = _REDUCTIONS[name], _OVER_ALL
        elif name in _ALONG or name in _PARTS:
            position, default = (_ALONG | _PARTS)[name]
        elif name in _PICKS:
            position, default = _PICKS[name], None
        else:
            return None
        dim = self.argument(position, "dim", "axis", "dims", "dimension", default=default)
        if dim is None and name in _REDUCTIONS:
            dim = _OVER_ALL
        if isinstance(dim, (tuple, list)) and not dim:
            dim = _OVER_ALL
        if isinstance(dim, str):
            return tuple(range(-x.ndim, 0)) if dim == _OVER_ALL else None
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        return removed(dims, x.ndim) if all(type(d) is int for d in dims) else None


def mixes(call: Call) -> tuple[ShardDim, str] | None:
    """(the shard, "mix" or "cut") of a call whose result on a shard is no shard of the result on the whole dim."""
    for x, shard in call.sharded():
        kind = _misuse(call, x, shard)
        if kind:
            return shard, kind
    return None


def _misuse(call: Call, x: T, shard: ShardDim) -> str:
    name, first = call.base, call.args[0] if call.args else call.kwargs.get("input")
    if name in ("matmul", "bmm", "mm", "__matmul__", "linear", "__rmatmul__", "scaled_dot_product_attention"):
        return "mix" if shard.kind == "sequence" and _contracts(call, x, shard) else ""
    if name == "einsum":
        return "mix" if shard.kind == "sequence" and _einsum_dim(call, x, shard) is None else ""
    if name == "cat" or name == "concat":
        dim = call.argument(1, "dim", "axis", default=0)
        return "mix" if removed([dim], x.ndim)[0] == shard.dim and not _only_shards(call) else ""
    if first is not x:
        return ""
    if name == "__getitem__":
        return _index_misuse(call, x, shard)
    if name in _PICKS:
        index = call.argument(2 if name != "take_along_dim" else 1, "index", "indices")
        if call.is_derived(index):
            return ""
    dims = call.dims(x)
    if dims is not None:
        if shard.dim not in dims or (name == "split" and shard.outer > 1):
            return ""
        if name in _PARTS or name == "glu":
            return "cut" if not _cuts_packed(call, shard) else ""
        return "mix"
    if name in ("layer_norm", "rms_norm"):
        return "mix" if -shard.dim <= len(call.argument(1, "normalized_shape")) else ""
    if name == "pad":
        pads = call.argument(1, "pad")
        return "mix" if any(pads[-2 * shard.dim - 2 : -2 * shard.dim]) else ""
    if name in ("conv1d", "conv2d"):
        weight = call.argument(1, "weight")
        return "mix" if shard.dim >= 2 - weight.ndim and weight.shape[shard.dim] > 1 else ""
    if name == "batch_norm":
        training = call.argument(5, "training", default=False)
        return "mix" if training and shard.kind == "sequence" and shard.dim != 1 - x.ndim else ""
    if any(word in name for word in _SPATIAL):
        return "mix" if shard.kind == "sequence" and shard.dim + x.ndim >= 2 else ""
    if name in ("tril", "triu"):
        return "mix" if shard.dim == -2 and shard.kind == "sequence" else ""
    return ""


def scrambles(call: Call, out: T) -> ShardDim | None:
    """The shard of a packed dim, [parts, size], that a view divides across the limits of its parts."""
    if call.base not in _VIEWS:
        return None
    for x, shard in call.sharded():
        if (
            shard.kind == "features"
            and shard.outer > 1
            and 1 not in out.shape
            and shard.viewed(x.shape, out.shape) is None
        ):
            return shard
    return None


def _only_shards(call: Call) -> bool:
    """Of `cat`: whether all parts are features, as of heads that a forward joins."""
    parts = call.argument(0, "tensors")
    shards = [call.shards(part) for part in parts]
    return all(shard is not None and shard.kind == "features" for shard in shards)


def _cuts_packed(call: Call, shard: ShardDim) -> bool:
    """Whether a packed dim, [parts, size], is cut between its parts."""
    number = 2 if call.base == "glu" else call.argument(1, "chunks", "indices_or_sections")
    return call.base in ("chunk", "tensor_split", "glu") and type(number) is int and shard.outer % number == 0


def _contracts(call: Call, x: T, shard: ShardDim) -> bool:
    """Whether a product sums over the shard dim."""
    if call.base == "scaled_dot_product_attention":
        return shard.dim == -2 and any(x is call.argument(i, name) for i, name in ((1, "key"), (2, "value")))
    first = call.args[0] if call.args else call.kwargs.get("input")
    left = (first is x) != (call.base == "__rmatmul__")
    return shard.dim == -1 if left else shard.dim == -2 and call.base != "linear"


def _einsum_dim(call: Call, x: T, shard: ShardDim) -> int | None:
    """Where the shard dim is in the result of an einsum; None: it is summed over."""
    equation = str(call.args[0]).replace(" ", "")
    operands = list(call.args[1]) if isinstance(call.args[1], (list, tuple)) else list(call.args[1:])
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    index = next((i for i, operand in enumerate(operands) if operand is x), 0)
    if not arrow or "." in equation or index >= len(terms) or len(terms[index]) != x.ndim:
        return shard.dim
    letter = terms[index][shard.dim]
    return output.index(letter) - len(output) if letter in output else None


def _index(call: Call, x: T) -> list[tuple[Any, int | None]] | None:
    """(item, the dim that it indexes; None for a new dim) of `x[...]`, without the ellipsis."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    taken = sum(_taken(item) for item in index if item is not None and item is not ...)
    items: list[tuple[Any, int | None]] = []
    dim = 0
    for item in index:
        if item is ...:
            skipped = x.ndim - taken
            items += [(slice(None), dim + offset) for offset in range(skipped)]
            dim += skipped
        elif item is None:
            items.append((item, None))
        else:
            items.append((item, dim))
            dim += _taken(item)
    items += [(slice(None), rest) for rest in range(dim, x.ndim)]
    return items


def _taken(item: Any) -> int:
    return item.ndim if isinstance(item, T) and item.dtype == torch.bool else 1


def _index_misuse(call: Call, x: T, shard: ShardDim) -> str:
    for item, dim in _index(call, x) or ():
        if dim is None or dim - x.ndim != shard.dim:
            continue
        if isinstance(item, slice):
            size = x.shape[shard.dim]
            cuts = item.indices(size) != (0, size, 1)
            parts = shard.kind == "features" and shard.outer > 1  # the limits of parts are not looked at
            return "cut" if cuts and not parts else ""
        return "" if call.is_derived(item) else "cut"
    return ""


# -- results ------------------------------------------------------------------------------------------------------


def shard_of_result(call: Call, out: T) -> ShardDim | None:
    """The shard dim of one result, as far as it is known."""
    for x, shard in call.sharded():
        result = _result(call, x, shard, out)
        if result is not None and -result.dim <= out.ndim:
            return result
    return None


def _result(call: Call, x: T, shard: ShardDim, out: T) -> ShardDim | None:
    name = call.base
    if name in _VIEWS:
        return shard.viewed(x.shape, out.shape) if call.args[0] is x else None
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = removed([call.argument(1, "dim0", "axis0"), call.argument(2, "dim1", "axis1")], x.ndim)
        return shard.moved({first: second, second: first}.get(shard.dim, shard.dim))
    if name in ("T", "t", "mT"):
        return shard.moved({-1: -2, -2: -1}.get(shard.dim, shard.dim))
    if name == "permute":
        order = call.argument(1, "dims")
        return shard.permuted(order if isinstance(order, (tuple, list)) else call.args[1:], x.ndim)
    if name == "unsqueeze":
        return shard.inserted(removed([call.argument(1, "dim")], out.ndim)[0])
    if name == "stack":
        return shard.inserted(removed([call.argument(1, "dim", default=0)], out.ndim)[0])
    if name == "squeeze":
        return shard.viewed(x.shape, out.shape)
    if name == "__getitem__":
        return _indexed(call, x, shard)
    if name in ("chunk", "split", "tensor_split", "glu") and shard.dim in (call.dims(x) or ()):
        return _packed_part(call, shard, out)
    if name in ("unbind", "select") or (name in _REDUCTIONS and out.ndim < x.ndim):
        return shard.without(call.dims(x) or ())
    if name == "linear":
        return shard if shard.dim < -1 and call.argument(0, "input") is x else None
    if name in ("matmul", "bmm", "mm", "__matmul__"):
        return None if _contracts(call, x, shard) else shard
    if name == "einsum":
        dim = _einsum_dim(call, x, shard)
        return shard.moved(dim) if dim is not None else None
    if name in ("embedding", "one_hot"):
        return shard.moved(shard.dim - 1)
    if name in ("conv1d", "conv2d", "conv3d") and shard.kind == "features":
        return shard if call.argument(6, "groups", default=1) > 1 else None  # else its channels were summed over
    if name in ("cat", "concat", "conv1d"):
        return shard if out.ndim == x.ndim and out.shape[shard.dim] == x.shape[shard.dim] else None
    return shard if broadcasts(shard, x.shape, out.shape) else None


def _packed_part(call: Call, shard: ShardDim, out: T) -> ShardDim | None:
    """A part of a packed dim. Of parts of several sizes nothing is known."""
    number = 2 if call.base == "glu" else call.argument(1, "chunks", "indices_or_sections")
    if not _cuts_packed(call, shard):
        return None
    return ShardDim(shard.kind, shard.dim, shard.outer // number, shard.size, shard.source)


def _indexed(call: Call, x: T, shard: ShardDim) -> ShardDim | None:
    """After slices, numbers and new dims; None after tensors."""
    items = _index(call, x) or []
    if any(isinstance(item, (T, list)) for item, _ in items):
        return None
    kept = [(item, dim) for item, dim in items if item is None or isinstance(item, slice)]
    for position, (item, dim) in enumerate(kept):
        if dim is not None and dim - x.ndim == shard.dim:
            sliced = _sliced(shard, item, x.shape[dim]) if isinstance(item, slice) else shard
            return sliced.moved(position - len(kept)) if sliced is not None else None
    return None


def _sliced(shard: ShardDim, item: slice, size: int) -> ShardDim | None:
    """After `x[start:stop]` of the dim: whole parts of a packed one, else not known."""
    start, stop, step = item.indices(size)
    if (start, stop, step) == (0, size, 1):
        return shard
    part = size // shard.outer
    if step != 1 or start % part or stop % part or stop <= start:
        return None
    return replace(shard, outer=(stop - start) // part)
