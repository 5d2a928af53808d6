"""Forwards that read a width from their input and use it twice: in views of shards, and where the full one is meant.

`B, T, C = x.shape` gives the width of all heads, and `y.view(B, T, C)` after attention means that of this rank's. The
same forward may scale by `C ** -0.5`, or view its input by `C`. So its sizes are integers that know both numbers. To
Python they are those of the full model. A function of PyTorch that works on a shard gets the local ones.

Which tensors are shards is followed while the forward runs: what column linears return, and all that is computed from
it, up to the row linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private.torch_dynamo import not_traced
from parallelize.plan.styles.contract import Contract, Conversion, InputWidth
from parallelize.state.forward_steps import SIZES, add_step, run_inner

T = torch.Tensor
Arguments = tuple[tuple[tuple[int, str], InputWidth], ...]
"""(position and name of an argument, what the plan says of its width)."""


class FullAndLocal(int):
    """An integer of the full model, which knows what it is on this rank. Arithmetic with whole numbers keeps both;
    where they are the same, as a head's width is, the result is a plain integer.

    local: on this rank.
    """

    local: int

    def __new__(cls, full: int, local: int) -> FullAndLocal:
        self = super().__new__(cls, full)
        self.local = local
        return self

    def __reduce__(self) -> Any:
        return FullAndLocal, (int(self), self.local)


def _on_both(name: str) -> Any:
    plain = getattr(int, name)

    def run(self: FullAndLocal, other: Any) -> Any:
        full = plain(self, other)
        if type(full) is not int:  # a float is a number of the full model
            return full
        return sized(full, plain(self.local, _local(other)))

    return run


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "pow"):
    setattr(FullAndLocal, f"__{_name}__", _on_both(f"__{_name}__"))


def sized(full: int, local: int) -> int:
    """An integer that is both, or a plain one where they are the same."""
    return full if full == local else FullAndLocal(full, local)


def _local(value: Any) -> Any:
    """The value with local integers, also those in sequences and slices."""
    if type(value) is FullAndLocal:
        return value.local
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        items = [_local(item) for item in value]
        return torch.Size(items) if isinstance(value, torch.Size) else type(value)(items)
    return slice(*map(_local, (value.start, value.stop, value.step))) if isinstance(value, slice) else value


# -- the module ------------------------------------------------------------------------------------------------------


def sizes_by_tensor(
    module: nn.Module,
    widths: Iterable[InputWidth],
    inner: Iterable[tuple[nn.Module, Contract]],
    argument_of: Callable[..., tuple[int, str]],
) -> None:
    """Let the forward of a module see sizes by tensor. Graphs leave it to eager mode.

    Args:
        inner: planned modules inside of it.
        argument_of: (module, name) to the position and name of an argument of its forward.
    """
    for child, contract in inner:
        if contract.traits.splits_output and contract.leave is Conversion.NONE:
            child.register_forward_hook(_returns_shard)
        elif contract.traits.sums_output:
            child.register_forward_hook(_returns_full)
    arguments: Arguments = tuple((argument_of(module, width.argument), width) for width in widths)
    add_step(module, SIZES, partial(_run, arguments))


def _run(arguments: Arguments, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _run_eagerly(arguments, module, args, kwargs)
    return _run_now(arguments, module, args, kwargs)


def _run_now(arguments: Arguments, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    widths = {}
    for (position, name), width in arguments:
        x = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(x, T) and x.ndim:
            widths[x.shape[-1]] = sized(x.shape[-1], local_width(x.shape[-1], width))
    with _SizesByTensor(widths):
        return run_inner(module, SIZES, args, kwargs)


_run_eagerly = not_traced(_run_now)


def local_width(features: int, width: InputWidth) -> int:
    """The features of this rank's heads. Raises: ShapeError `uneven-input`."""
    size = features * width.local
    if size % width.full:
        what = (
            f"the input {width.argument} has {features} features, of which {width.local} of {width.full} heads have "
            "no whole number"
        )
        raise ShapeError(Problem("uneven-input", what, fix="check the size under `local_inputs`"))
    return size // width.full


# -- the forward -----------------------------------------------------------------------------------------------------

_SHARD = "_is_shard_of_heads"
"""An attribute of tensors that a forward computes from what column linears return."""

_SIZES = (
    *("view", "reshape", "unflatten", "expand", "split", "split_with_sizes", "tensor_split", "chunk", "narrow"),
    *("repeat", "tile", "repeat_interleave", "new_zeros", "new_ones", "new_empty", "new_full", "as_strided"),
    *("__getitem__", "__setitem__", "group_norm"),
)
"""Functions whose integers are sizes of the tensor that they are given, or of their result, or ranges of it."""

_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")
_NUMBERS = (
    *(f"__{side}{name}__" for side in ("", "r", "i") for name in _ARITHMETIC),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide"),
    *("floor_divide", "remainder", "fmod", "pow", "float_power", "fill_", "full_like", "masked_fill", "where"),
    *("clamp", "clamp_min", "clamp_max"),
)
"""Functions whose integers are numbers to compute with."""


class _SizesByTensor(TorchFunctionMode):
    """Functions on shards get local sizes, all others full ones.

    widths: of arguments of the forward. Where a tensor that is no shard has one as its last dim, it answers with both.
    """

    def __init__(self, widths: dict[int, int]):
        super().__init__()
        self.widths = widths

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is T.size or getattr(func, "__self__", None) is T.shape:
            return self._shape(func(*args, **kwargs), *args, **kwargs)
        if not _has_shard(args) and not (kwargs and _has_shard(kwargs.values())):
            return func(*args, **kwargs)
        if _has_two_sizes(args) or (kwargs and _has_two_sizes(kwargs.values())):
            args, kwargs = _for_shard(func, args, kwargs)
        out = func(*args, **kwargs)
        _mark(out)
        return out

    def _shape(self, shape: Any, x: T, dim: int | None = None) -> Any:
        if not x.ndim or dim not in (None, -1, x.ndim - 1) or _SHARD in x.__dict__:
            return shape
        width = self.widths.get(x.shape[-1])
        if width is None:
            return shape
        return width if dim is not None else torch.Size((*shape[:-1], width))


def _has_shard(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, T):
            if _SHARD in value.__dict__:
                return True
        elif type(value) in (list, tuple) and _has_shard(value):
            return True
    return False


def _has_two_sizes(values: Iterable[Any]) -> bool:
    for value in values:
        if type(value) is FullAndLocal:
            return True
        if isinstance(value, (list, tuple)) and _has_two_sizes(value):
            return True
        if type(value) is slice and _has_two_sizes((value.start, value.stop)):
            return True
    return False


def _mark(out: Any) -> None:
    if isinstance(out, T):
        out.__dict__[_SHARD] = True
    elif type(out) in (list, tuple):
        for item in out:
            _mark(item)


def _for_shard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function on a shard. Raises: ShapeError `size-or-number`."""
    name = getattr(func, "__name__", "")
    if name in _NUMBERS:
        return args, kwargs
    if name not in _SIZES:
        what = (
            f"`{name}` of a shard is given an integer of which this rank has a part, and it is not known whether it is "
            "a size of the shard or a number"
        )
        fix = "compute it from the shard's own shape, or leave the linears around it whole"
        raise ShapeError(Problem("size-or-number", what, fix=fix))
    return _local(args), {key: _local(value) for key, value in kwargs.items()}


def _returns_shard(_: nn.Module, __: Any, output: Any) -> None:
    _mark(output)


def _returns_full(_: nn.Module, __: Any, output: Any) -> None:
    for x in output if isinstance(output, tuple) else (output,):
        if isinstance(x, T):
            x.__dict__.pop(_SHARD, None)
