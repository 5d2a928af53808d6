"""Calls back when a planned model gets another submodule, parameter or forward hook: its next forward is not the one
that was watched.

PyTorch has one hook for all registrations of modules, and none for those of hooks and for insertions into lists, whose
methods are wrapped. All cost a look into a dictionary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied

_callbacks: weakref.WeakKeyDictionary[nn.Module, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
_roots: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def when_changed(root: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` when `root`, or one of its submodules of now, is given a module as an attribute or a forward hook
    of the user.

    It must not refer to `root`. Deep copies of the model do not call it.
    """
    _install()
    for module in root.modules():
        _roots.setdefault(module, weakref.WeakSet()).add(root)
        callbacks = _callbacks.setdefault(module, [])
        if not any(_is_same(callback, other) for other in callbacks):
            callbacks.append(callback)


_FOLLOWERS = "followers of changes"


def follow_changes(function: Callable[[], None]) -> None:
    """Call a function after each such change of any planned model, until the last one is gone."""
    followers = patches.lease().notes.setdefault(_FOLLOWERS, [])
    if function not in followers:
        followers.append(function)


def plan_changes(root: nn.Module) -> None:
    """Plan modules that were added since the plan. A collective over the mesh if a model with stages got adapters."""
    record = applied(root)
    plan_later = record.stage_adapters or record.plan_later
    if plan_later is not None:
        plan_later(root)


def take_changes(root: nn.Module) -> None:
    """Plan what a model was given, and let data ranks have the same values of it, as its next forward would: it is read
    before that. A collective over the ranks of the model."""
    data: Any = applied(root).data
    if data is not None and data.added_parameters is not None:
        data.added_parameters.manage_added()
    plan_changes(root)


def roots_around(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The planned models that have had these modules since their plan."""
    return list({id(root): root for module in modules for root in _roots.get(module, ())}.values())


def _is_same(callback: Any, other: Any) -> bool:
    """Whether two callbacks are one function of the same objects."""
    if isinstance(callback, partial) and isinstance(other, partial):
        return callback.func == other.func and callback.args == other.args
    return callback is other


def is_of_packages(hook: Any) -> bool:
    """Whether a hook is torch's or this package's, and not the user's."""
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in ("torch", "parallelize")


def _install() -> None:
    patches.hook("registration hook of modules", register_module_module_registration_hook, _registered)
    patches.hook("registration hook of parameters", register_module_parameter_registration_hook, _registered_parameter)
    private.wrap_in_torch("forward hooks", _registering)
    private.wrap_in_torch("list of modules", _inserting)
    private.wrap_in_torch("sequence of modules", _inserting)


def _registered(parent: nn.Module, name: str, child: Any) -> None:
    if torch.compiler.is_compiling():
        return  # as by `layers[:n]`; a graph that read the dictionary would depend on all models of the process
    callbacks = _callbacks.get(parent, ()) if child is not None else ()
    for callback in callbacks:
        callback()
    for follow in patches.lease().notes.get(_FOLLOWERS, ()) if callbacks else ():
        follow()


def _registered_parameter(parent: nn.Module, name: str, parameter: Any) -> None:
    if name not in parent._parameters and not torch.compiler.is_compiling():
        _registered(parent, name, parameter)


def _registering(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def register_forward_hook(self: nn.Module, hook: Callable[..., Any], **options: Any) -> Any:
        handle = stock(self, hook, **options)
        if torch.compiler.is_compiling():
            return handle
        for callback in _callbacks.get(self, ()) if not is_of_packages(hook) else ():
            callback()
        return handle

    return register_forward_hook


def _inserting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`insert` moves the modules of a list by itself, without registering any."""

    @wraps(stock)
    def insert(self: Any, index: int, module: nn.Module) -> Any:
        result = stock(self, index, module)
        _registered(self, str(index), module)
        return result

    return insert
