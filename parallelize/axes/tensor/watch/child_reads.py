"""Modules whose forward reads the parameters of their children, where it would find DTensors.

A child whose parameters are full on every rank shows them as local tensors while such a forward runs. A sharded one is
refused. The source text is followed from `forward` through the methods and properties that it names, so that code for
initialization, or for fusing weights, does not count. What it cannot see is refused by name in the first forward
(`first_forward.py`).
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from parallelize.axes.tensor.local_inputs import attribute_path, local_names, own_attribute, parsed, receiver
from parallelize.base.errors import ModelError, Problem
from parallelize.plan.adapters import adapted_layers
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan

SLUG = "reads-child-parameters"
FIX = (
    "replace it by modules that call each other, or plan only modules outside of it; `allow: reads-child-parameters` "
    "in the "
    "plan, where that line never runs"
)


def reads_parameter(module: nn.Module, parameter: str, place: str) -> ModelError:
    """The error of a forward that runs an operation of a plain tensor and a parameter of another module."""
    what = f"{type(module).__name__} ({place}) reads {generic(parameter)} from outside the module that has it"
    return ModelError(
        Problem(SLUG, what, fix="replace it by modules that call each other, or plan only modules outside of it")
    )


class ChildRead(NamedTuple):
    """`self.child.parameter` in a method that a forward reaches; `child` may be a path to an inner module. place: file
    and line.

    by_name: the module has a local name there, as `core` of `core = self.core`. Like a path, it is refused in the first
    forward alone.
    """

    child: str
    parameter: str
    method: str
    place: str
    by_name: bool = False

    @property
    def is_direct(self) -> bool:
        return "." not in self.child and not self.by_name


def foreign_readers(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Modules whose code reads parameters of other modules, where it would meet DTensors."""
    adapted = {*adapted_layers(model)}
    for fqn, module in model.objects.items():
        if isinstance(module, nn.MultiheadAttention) and _shards_parts(resolved, model, fqn):
            what = f"the rules of {fqn} shard a part of an nn.MultiheadAttention, which computes with all of its parts"
            fix = f"`multihead(heads)` for {fqn} and `rowwise(heads)` for its out_proj, or `replicate` for both"
            yield Problem(SLUG, what, fix=fix)
    if SLUG in resolved.plan.allow:
        return
    read: dict[ChildRead, str] = {}
    for fqn in model.objects:
        row = resolved.modules.get(fqn)
        if fqn in adapted or (row is not None and row.contract.traits.reads_shards):
            continue
        for item, name in _reads_in(model, fqn):
            is_known = row is not None and f"{item.child}.{item.parameter}" in row.contract.uses
            # a module that is not a child: refused in the first forward, if the line is reached
            is_known |= not item.is_direct
            if resolved.parameters[name].layout.dim is not None and not is_known:
                read.setdefault(item, fqn)
    for item, fqn in read.items():
        name = type(model.objects[fqn]).__name__
        what = f"{name}.{item.method} ({item.place}) reads self.{item.child}.{item.parameter}"
        yield Problem(SLUG, f"{what} from outside the module that has it", rows=(("module", generic(fqn)),), fix=FIX)


def _reads_in(model: ModelFacts, fqn: str) -> Iterator[tuple[ChildRead, str]]:
    """What a module's forward reads of its children, with the first name of each parameter."""
    module = model.objects[fqn]
    for item in _reads_below(module):
        owner = _inner(module, item.child)
        if owner is None:
            continue
        cls: Any = type(owner)
        for key in (item.parameter, *_read_by(cls, item.parameter)):
            name = ".".join(filter(None, (fqn, item.child, key)))
            if owner._parameters.get(key) is not None and name in model.parameter_fqns:
                yield item._replace(parameter=key), model.parameter_fqns[name]


def _reads_below(module: nn.Module, method: str = "forward") -> Iterator[ChildRead]:
    """What a method reads of children, and what methods of inner modules that it calls in place of their forwards read
    of theirs."""
    cls: Any = module.__class__
    for item in reads_of_children(cls, method):
        yield item
        owner = _inner(module, item.child)
        if owner is not None and item.parameter != "forward":
            below = _reads_below(owner, item.parameter)
            yield from (read._replace(child=f"{item.child}.{read.child}") for read in below)


def _inner(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None: something else is there."""
    for name in path.split("."):
        inner = getattr(module, name, None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


@lru_cache(maxsize=4096)
def _read_by(cls: Any, method: str) -> tuple[str, ...]:
    """What a method of a child that is called in place of its forward reads of the child itself, or lets PyTorch's
    forward read."""
    function = _function(inspect.getattr_static(cls, method, None))
    if method == "forward" or function is None or function.__module__.partition(".")[0] == "torch":
        return ()
    tree = parsed(function)
    if tree is None:
        return ()
    own = [own_attribute(node, receiver(tree)) for node in ast.walk(tree)]
    own += _READ_BY_TORCH if any(_super_attribute(node) == "forward" for node in ast.walk(tree)) else ()
    return tuple(dict.fromkeys(filter(None, own)))


_READ_BY_TORCH = ("weight", "bias")


def children_read(resolved: ResolvedPlan, model: ModelFacts, fqn: str) -> tuple[str, ...]:
    """Submodules whose replicated parameters this module's forward reads: they show local tensors while it runs.

    Parameters of a module's own lists and dicts count as its own.
    """
    reads = [(item, resolved.parameters[name]) for item, name in _reads_in(model, fqn)]
    shown = [item.child for item, row in reads if not row.plain and (item.is_direct or row.layout.dim is None)]
    for child, container in _parameter_containers(model.objects[fqn]):
        names = (".".join(filter(None, (fqn, child, key))) for key, _ in container.named_parameters(recurse=False))
        if any(not resolved.parameters[model.parameter_fqns[name]].plain for name in names):
            shown.append(child)
    return tuple(dict.fromkeys(shown))


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: what is in them is called, or read, by the module that has them."""


def _parameter_containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The lists and dicts of parameters that a module has, at a path of containers."""
    if isinstance(module, _CONTAINERS):
        return
    pending = [(name, child) for name, child in module.named_children() if isinstance(child, _CONTAINERS)]
    while pending:
        path, container = pending.pop(0)
        if isinstance(container, (nn.ParameterList, nn.ParameterDict)):
            yield path, container
        pending += [
            (f"{path}.{name}", child) for name, child in container.named_children() if isinstance(child, _CONTAINERS)
        ]


@lru_cache(maxsize=4096)
def reads_of_children(cls: Any, method: str = "forward") -> tuple[ChildRead, ...]:
    """What a method of a class, and the methods and properties that it names, read of parameters of children.

    Reading a parameter's dtype, device or shape does not count, nor comparing its identity or its type. Modules of
    torch look at the class of what they read before they use it.
    """
    if cls.__module__.partition(".")[0] == "torch":
        return ()
    found: list[ChildRead] = []
    pending, seen = [(method, cls.__mro__)], set()
    while pending:
        name, bases = pending.pop()
        base = next((base for base in bases if name in vars(base)), nn.Module)
        if base is nn.Module or (base, name) in seen:
            continue
        seen.add((base, name))
        function = _function(vars(base)[name])
        tree = parsed(function) if function is not None else None
        if function is None or tree is None:
            continue
        found += _reads(tree, name, function)
        own = receiver(tree)
        for node in ast.walk(tree):
            if called := own_attribute(node, own):
                pending.append((called, cls.__mro__))
            elif called := _super_attribute(node):
                pending.append((called, cls.__mro__[cls.__mro__.index(base) + 1 :]))
    return tuple(dict.fromkeys(found))


def _function(member: Any) -> Any | None:
    """The function behind a method, property or decorated method."""
    member = getattr(member, "__func__", getattr(member, "fget", member))
    return inspect.unwrap(member) if inspect.isfunction(member) else None


def _reads(tree: ast.Module, method: str, function: Any) -> Iterator[ChildRead]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    code, own = function.__code__, receiver(tree)
    names = local_names(tree, own)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        child = attribute_path(node.value, own, names)
        if child and not _is_harmless(node, parents[node]):
            place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno + node.lineno - 1}"
            yield ChildRead(child, node.attr, method, place, by_name=not attribute_path(node.value, own))


_DESCRIPTION = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta", "is_cuda"}


def _is_harmless(node: ast.Attribute, parent: ast.AST) -> bool:
    """Whether an expression does not use the values of the parameter that it reads."""
    if isinstance(parent, ast.Attribute):
        return parent.attr in _DESCRIPTION
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in parent.ops)
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in ("isinstance", "hasattr", "getattr", "id", "type")
        and node in parent.args
    )


def _super_attribute(node: ast.AST) -> str:
    """The name in `super().name`; empty for any other expression."""
    value = node.value if isinstance(node, ast.Attribute) else None
    is_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    return node.attr if is_super and isinstance(node, ast.Attribute) else ""


def _shards_parts(resolved: ResolvedPlan, model: ModelFacts, fqn: str) -> bool:
    """Whether an `nn.MultiheadAttention` is neither replicated nor sharded by heads with an `out_proj` that sums."""
    row, out = resolved.modules.get(fqn), resolved.modules.get(f"{fqn}.out_proj" if fqn else "out_proj")
    if row is not None and row.contract.computes_by_heads:
        return out is None or not out.contract.traits.sums_output
    names = [f"{fqn}.{key}" if fqn else key for key, _ in model.objects[fqn].named_parameters()]
    rows = [resolved.parameters[model.parameter_fqns[name]] for name in names]
    return any(row.layout.dim is not None or row.partial for row in rows)
