"""Arguments of a module that have a part for each head, such as ALiBi's biases: each rank takes the parts of its
heads."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.sizes_by_tensor import local_width
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.styles.contract import InputShard, InputWidth

Call = tuple[tuple[Any, ...], dict[str, Any]]


def local_inputs(
    module: nn.Module,
    shards: tuple[InputShard, ...],
    widths: tuple[InputWidth, ...],
    group: Group,
    argument_of: Callable[..., Any],
) -> tuple[Callable[[tuple[Any, ...], dict[str, Any]], Call], ...]:
    """For each argument, a function from a call's arguments to those with this rank's part of it, or with a local
    width.

    argument_of: (module, name) to the position and name of an argument of its forward.
    """
    if group.size == 1:
        return ()
    parts = tuple(
        (argument_of(module, shard.argument), partial(own_part, shard=shard, group=group)) for shard in shards
    )
    return tuple(
        partial(_with_own_part, argument, take)
        for argument, take in (*parts, *read_local_widths(module, widths, argument_of))
    )


def _with_own_part(
    argument: tuple[int, str], take: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    position, name = argument
    if position < len(args):
        return (*args[:position], take(args[position]), *args[position + 1 :]), kwargs
    return args, ({**kwargs, name: take(kwargs[name])} if name in kwargs else kwargs)


def own_part(value: Any, shard: InputShard, group: Group) -> Any:
    """The heads of this rank, of a tensor whose dim has all heads, once or for each sequence of the batch.

    Anything but a tensor stays, and so does a dim of size 1, which is broadcast over the heads. The gradient is that of
    all heads.

    Raises: ShapeError `uneven-input`.
    """
    if not isinstance(value, torch.Tensor) or value.ndim <= shard.dim or value.shape[shard.dim] == 1:
        return value
    heads, size = shard.heads, value.shape[shard.dim]
    if size % heads:
        what = f"the input {shard.argument} has {size} entries along dim {shard.dim}, which {heads} heads do not divide"
        rows = (("shape", str(list(value.shape))),)
        raise ShapeError(Problem("uneven-input", what, rows=rows, fix="check the dim under `local_inputs`"))
    if value.requires_grad:
        value = ops.copy(value, group)
    start, stop = shard.owned[group.rank]
    by_head = value.unflatten(shard.dim, (size // heads, heads))
    return by_head.narrow(shard.dim + 1, start, stop - start).flatten(shard.dim, shard.dim + 1)


# -- local widths ----------------------------------------------------------------------------------------------------
# Code that takes the width of all heads from its input: `B, T, C = x.shape`, and after attention `y.view(B, T, C)`.
# The input of column linears is full, and what they return is this rank's part. So the module's own code is given its
# input as a tensor that answers a local width where it is asked for its shape, and is full for every operation. The
# modules in it are given the full tensor.


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
    """For each argument, a function from a call's arguments to those with a local width; the modules inside of
    `module`, and who called it, get the full tensors.

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
    local = x.as_subclass(LocalWidth)
    local.width, local.full = local_width(x.shape[-1], width), x
    return local


def full_value(value: Any) -> Any:
    """The full tensor of one that answers a local width; anything else itself."""
    return value.full if type(value) is LocalWidth else value


def _with_full_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(type(value) is LocalWidth for value in (*args, *kwargs.values())):
        return tuple(map(full_value, args)), {name: full_value(value) for name, value in kwargs.items()}
    return None


def _with_full_output(_: nn.Module, __: Any, output: Any) -> Any:
    if type(output) is LocalWidth:
        return full_value(output)
    if type(output) in (tuple, list) and any(type(value) is LocalWidth for value in output):
        return type(output)(map(full_value, output))
    return None


# -- input widths ----------------------------------------------------------------------------------------------------
# Forwards that divide the width of their input by a number of heads, as `C // self.n_head`. The input of a column
# linear has all features, and its output those of this rank's heads: no value of `n_head` is right for both.


@lru_cache(maxsize=4096)
def divided_width(cls: Any) -> str:
    """Where the forward of a class divides a variable by one of its attributes: "`C // self.n_head`, line 12 of a.py";
    or ""."""
    function = inspect.unwrap(cls.forward)
    tree = parsed(function)
    if tree is None:
        return ""
    own = receiver(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.FloorDiv, ast.Div)):
            continue
        if isinstance(node.left, ast.Name) and own_attribute(node.right, own):
            code = function.__code__
            return f"`{ast.unparse(node)}`, line {code.co_firstlineno + node.lineno - 1} of {code.co_filename}"
    return ""


def advice_on_widths(cls: Any) -> str:
    """What to write instead of such a division in the forward of a class; empty where there is none."""
    where = divided_width(cls)
    if not where:
        return ""
    return (
        f"the forward takes the width of a head from its input ({where}), which has all features, and this rank has "
        "some of the heads: make the width an attribute (head_dim = hidden size // heads, in __init__), and let the "
        "shards say how many heads there are: view(batch, length, -1, self.head_dim), and flatten(2) after attention"
    )


# -- syntax ----------------------------------------------------------------------------------------------------------
# The syntax tree of the source text of a function.


# CPython 3.11 cannot build two syntax trees at once (SystemError: recursion depth mismatch)
_parsing = threading.Lock()


def parsed(function: Any) -> ast.Module | None:
    """The syntax tree of a function; None where there is no source to read."""
    with _parsing:
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None


def receiver(tree: ast.Module) -> str:
    """The name of a method's first argument, most often `self`; empty without one."""
    definition = tree.body[0]
    arguments = definition.args.args if isinstance(definition, ast.FunctionDef) else []
    return arguments[0].arg if arguments else ""


def own_attribute(node: ast.AST, receiver: str) -> str:
    """The name in `self.name`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver:
        return node.attr
    return ""


def attribute_path(node: ast.AST, receiver: str, names: Mapping[str, str] | None = None) -> str:
    """`name` of `self.name`, and `name.inner` of `self.name.inner`; empty for any other expression. names: as of
    `local_names`."""
    if isinstance(node, ast.Name):
        return (names or {}).get(node.id, "")
    if name := own_attribute(node, receiver):
        return name
    outer = attribute_path(node.value, receiver, names) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""


def local_names(tree: ast.Module, receiver: str) -> dict[str, str]:
    """The paths of names that a method binds once: of `core = self.core` it is `core: "core"`, of `table = core.emb`
    `table: "core.emb"`."""
    nodes = list(ast.walk(tree))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
    names: dict[str, str] = {}
    for node in sorted(assigned, key=lambda node: node.lineno):
        (target,) = node.targets
        path = attribute_path(node.value, receiver, names)
        if path and isinstance(target, ast.Name) and bound[target.id] == 1:
            names[target.id] = path
    return names
