"""Code that takes the width of all heads from its input: `B, T, C = x.shape`, and after attention `y.view(B, T, C)`.

The input of column linears is full, and what they return is this rank's part. So the module's own code is given its input as a tensor
that answers a local width where it is asked for its shape, and is full for every operation. The modules in it are given the full tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.styles.contract import InputWidth

T = torch.Tensor


class LocalWidth(T):
    """A full tensor, which answers `width` as the size of its last dim. What is computed of it is a plain tensor.

    full: the tensor that it was made of.
    """

    width: int
    full: T

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.plain_functions():
            out = func(*args, **(kwargs or {}))
            if func is not T.size and getattr(func, "__self__", None) is not T.shape:
                return out
            x = args[0]
            asked = (*args[1:], *(kwargs or {}).values())
            if not asked or asked == (None,):
                return torch.Size((*out[:-1], x.width))
            return x.width if asked[0] in (-1, x.ndim - 1) else out


def read_local_widths(module: nn.Module, widths: tuple[InputWidth, ...], argument_of: Any) -> tuple[Any, ...]:
    """For each argument, a function from a call's arguments to those with a local width; the modules inside of `module`, and who called
    it, get the full tensors.

    argument_of: (module, name) to the position and name of an argument of its forward.
    """
    scaled = [width for width in widths if width.local != width.full]
    if not scaled:
        return ()
    for inner in module.modules():
        if inner is not module:
            inner.register_forward_pre_hook(_with_full_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(_with_full_output, prepend=True)
    return tuple((argument_of(module, width.argument), partial(with_local_width, width=width)) for width in scaled)


def with_local_width(x: Any, width: InputWidth) -> Any:
    """The tensor with a local width; anything else stays. Raises: ShapeError `uneven-input`."""
    if not isinstance(x, T) or not x.ndim:
        return x
    size = x.shape[-1] * width.local
    if size % width.full:
        what = f"the input {width.argument} has {x.shape[-1]} features, of which {width.local} of {width.full} heads have no whole number"
        raise ShapeError(Problem("uneven-input", what, fix="check the size under `local_inputs`"))
    local = x.as_subclass(LocalWidth)
    local.width, local.full = size // width.full, x
    return local


def _full(value: Any) -> Any:
    return value.full if type(value) is LocalWidth else value


def _with_full_inputs(_: nn.Module, args: tuple, kwargs: dict) -> Any:
    if any(type(value) is LocalWidth for value in (*args, *kwargs.values())):
        return tuple(map(_full, args)), {name: _full(value) for name, value in kwargs.items()}
    return None


def _with_full_output(_: nn.Module, __: Any, output: Any) -> Any:
    if type(output) is LocalWidth:
        return _full(output)
    if type(output) in (tuple, list) and any(type(value) is LocalWidth for value in output):
        return type(output)(map(_full, output))
    return None
