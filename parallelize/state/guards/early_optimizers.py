"""Optimizers that were built before parameters of the model are replaced: their steps would change nothing.

They are refused, or given the new parameters where no step can have been taken.

To find them, every object of the process is inspected, which takes tenths of a second. An optimizer references each of
its parameters, so the search is needed only if something other than the model's modules references a parameter.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.state.sharding import reshard_like


def refuse_early_optimizers(module: nn.Module, replaced: Iterable[str] | None = None) -> None:
    """Refuse a model if an optimizer steps parameters that will be replaced.

    Args:
        module: the root of the model.
        replaced: names of the parameters that will be replaced. None: all.

    Raises: ModelError `early-optimizer`.
    """
    names = None if replaced is None else set(replaced)
    named = module.named_parameters(remove_duplicate=False)
    parameters = {id(parameter) for name, parameter in named if names is None or name in names}
    if not parameters or not _referenced_elsewhere(module):
        return
    if any(True for _ in _optimizers_of(parameters)):
        gc.collect()  # an unused optimizer may still exist in a reference cycle
    for optimizer in _optimizers_of(parameters):
        what = (
            f"a parameter of this model is already in an optimizer ({type(optimizer).__name__}), which could not step "
            "it"
        )
        fix = "build the optimizer afterwards, from the model that is returned"
        raise ModelError(Problem("early-optimizer", what, fix=fix))


def retire_optimizers(parameters: Sequence[Any]) -> None:
    """Let the next step of each optimizer that has one of these parameters raise ModelError `early-optimizer`: the
    model has others from now on."""
    for optimizer in _optimizers_of({id(parameter) for parameter in parameters}):
        optimizer.step = MethodType(_retired, optimizer)


def _retired(self: Optimizer, *_: Any, **__: Any) -> Any:
    what = (
        f"this {type(self).__name__} was built before resize_token_embeddings, and steps an embedding that was replaced"
    )
    raise ModelError(Problem("early-optimizer", what, fix="build the optimizer again, after the resizing"))


def rebind_parameters(replaced: Sequence[tuple[Any, Any, Layout]]) -> None:
    """Let lists and dictionaries that have parameters of the model, as those of optimizers, have what takes their
    places. The state of an optimizer, which was loaded before the first step, goes with them: values of the full shape
    are divided as the parameter is.

    Args:
        replaced: (parameter, new one, its layout) of each, of which none was stepped yet. Nothing else refers to a
            parameter, but what uses it.
    """
    new_of = {id(old): (new, layout) for old, new, layout in replaced}
    for old, _, _ in replaced:
        if sys.getrefcount(old) > _IN_LOOP:
            for holder in gc.get_referrers(old):  # inspects every object of the process, once for each holder or so
                _replace_in(holder, new_of)


_IN_LOOP = 3
"""References to a parameter above: of its tuple, of the variable, and of the call."""


def _replace_in(holder: Any, new_of: Mapping[int, tuple[Any, Layout]]) -> None:
    if type(holder) is list:
        holder[:] = [new_of[id(value)][0] if id(value) in new_of else value for value in holder]
    elif type(holder) in (dict, defaultdict):
        holder.update({key: new_of[id(value)][0] for key, value in holder.items() if id(value) in new_of})
        for old in [key for key in holder if id(key) in new_of]:
            new, layout = new_of[id(old)]
            holder[new] = _state_of(new, layout, old, holder.pop(old))


def _state_of(new: Any, layout: Layout, old: Any, state: Any) -> Any:
    """The state of a parameter, for what takes its place."""
    if type(state) is not dict or not isinstance(new, DTensor):
        return state
    return {
        key: reshard_like(value, layout, new)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == old.shape
        else value
        for key, value in state.items()
    }


def _referenced_elsewhere(module: nn.Module) -> bool:
    """Whether anything but the modules of this model refers to one of its parameters."""
    # by id: modules copied with `copy.copy` have one dict
    slots = list({id(owner._parameters): owner._parameters for owner in module.modules()}.values())
    owned = Counter(id(parameter) for parameters in slots for parameter in parameters.values())
    own_references = _references({"probe": object()})[0][1] - 1  # what counting adds, which depends on Python's version
    return any(
        count - own_references > owned[key]
        for parameters in slots
        for key, count in _references(parameters)
        if key != id(None)
    )


def _references(values: dict[str, Any]) -> list[tuple[int, int]]:
    """(id, reference count) of each value."""
    return [(id(value), sys.getrefcount(value)) for value in values.values()]


def _optimizers_of(parameters: set[int]) -> Iterator[Any]:
    classes = set(_subclasses(Optimizer))
    for candidate in gc.get_objects():
        # type() instead of isinstance(), which would initialize lazy objects
        if type(candidate) in classes and any(id(p) in parameters for p in _stepped_by(candidate)):
            yield candidate


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _stepped_by(optimizer: Any) -> list[Any]:
    return [parameter for group in vars(optimizer).get("param_groups", ()) for parameter in group["params"]]
