"""What users add to a planned model, and no plan knows of: adapters, parameters, and hooks that keep a shard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.tensor.watch.shard_dims import Kind
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied


def refuse_adapters(module: nn.Module, prefix: str, planned_names: Collection[str]) -> None:
    """Refuse a planned module that was wrapped, or replaced, by one that trains.

    Args:
        module: the model, or a part of it whose names begin with `prefix`.
        planned_names: of the modules whose records carry their names.

    Raises: ModelError `added-parameter`.
    """
    modules = dict(module.named_modules())
    planned = {applied(child).name: child for child in modules.values()}
    for path, child in modules.items():
        name = (prefix + path).rstrip(".")
        if name not in planned_names or applied(child).name:
            continue
        is_elsewhere = name in planned and planned[name] not in child.modules()
        added = [key for key, parameter in child.named_parameters() if _trains_unplanned(parameter)]
        if added and not is_elsewhere:
            raise _added_parameter(f"{added[0]} of {name}, which is a {type(child).__name__} now")


def refuse_added(tensors: Iterable[Any], module: str) -> None:
    """Refuse an operation on sequence shards with a parameter that no plan knows; its gradient would be that of some tokens.

    Raises: ModelError `added-parameter`.
    """
    if any(map(_trains_unplanned, tensors)):
        raise _added_parameter(f"one of {module}, inside the sequence-parallel region")


def _trains_unplanned(parameter: Any) -> bool:
    return isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.requires_grad


def _added_parameter(which: str) -> ModelError:
    what = f"a parameter was added after the plan, {which}: a rank computes a part of its gradient, and no plan sums the parts"
    fix = (
        "add it to the model and to the plan before parallelize_module, or merge adapters before it; "
        "or train it without tp, over data axes"
    )
    return ModelError(Problem("added-parameter", what, fix=fix))


class Given(NamedTuple):
    """A shard that forward hooks of the user on the module `name` were given, or made of it."""

    tensor: weakref.ref[torch.Tensor]
    kind: Kind
    name: str


def refuse_kept(given: Iterable[Given], output: Any) -> None:
    """Refuse a hook that kept a shard, which code after the forward would take for the full tensor.

    Args:
        output: of the model, which may contain such a tensor.

    Raises: ModelError `kept-shard`.
    """
    returned = {id(leaf) for leaf in private.tree_leaves(output)}
    for reference, kind, name in given:
        x = reference()
        if x is None or id(x) in returned or not _is_referred_to(x):
            continue
        part = "tokens of each sequence" if kind == "sequence" else "features"
        what = f"a forward hook on {name} keeps the output, of which a rank has a part: some {part}"
        fix = "hook a module whose output is full on every rank: the block around it, or one outside the sequence-parallel region"
        raise ModelError(Problem("kept-shard", what, fix=fix))


def _is_referred_to(x: torch.Tensor) -> bool:
    """Whether any object of Python's refers to a tensor, apart from this package's; autograd may keep it alive too."""
    return any(not type(holder).__module__.startswith("parallelize.") for holder in gc.get_referrers(x))
