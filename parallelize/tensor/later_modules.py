"""Calls back when a submodule is added to, or replaced in, a planned model: its next forward is no longer the one that was seen.

PyTorch has one hook for all registrations of modules, which costs a look into a dictionary for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_callbacks: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


def when_modules_change(root: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` after a module is assigned to an attribute of `root` or of one of its submodules of now.

    It must not refer to `root`. Deep copies of the model do not call it.
    """
    if not _callbacks:
        _install()
    for module in root.modules():
        _callbacks[module] = callback


def _install() -> None:
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    callback = _callbacks.get(parent)
    if callback is not None and child is not None:
        callback()


_is_installed = False
