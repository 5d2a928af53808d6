"""The dispatcher library of this package: how an op with a process group among its arguments is defined.

Groups are named in arguments by `Group.key`, because only text can stand there; kernels take the `Group` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.groups import Group

NAMESPACE = "parallelize"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}  # by name; they take a Group where the op takes its key
_GROUP_AT: dict[str, int] = {}
_EVERY_DEVICE = "CompositeExplicitAutograd"


def define(schema: str) -> Callable[[Kernel], Kernel]:
    """Define an op by its schema; the decorated function is its kernel on every device."""
    name, _, arguments = schema.partition("(")
    at = [text.split()[1] for text in arguments.partition(")")[0].split(", ")].index("group")
    LIBRARY.define(schema)

    def kernel(function: Kernel) -> Kernel:
        KERNELS[name], _GROUP_AT[name] = function, at
        LIBRARY.impl(name, lambda *args: function(*with_group(name, args, Group.by_key(args[at]))), _EVERY_DEVICE)
        return function

    return kernel


def fake(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the op's kernel on tensors without values."""
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=LIBRARY)


def with_group(name: str, args: tuple, group: Any) -> tuple:
    """An op's arguments with the group itself in the place of its key."""
    at = _GROUP_AT[name]
    return (*args[:at], group, *args[at + 1 :])


def group_key(name: str, args: tuple) -> str:
    return args[_GROUP_AT[name]]
