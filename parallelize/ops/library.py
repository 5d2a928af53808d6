"""The dispatcher library of this package, and how to define an op that takes a process group.

An op's arguments cannot contain a group, so they contain its `Group.key`; kernels take the `Group` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.ops.simulation import GroupKernel, simulate

NAMESPACE = "parallelize"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Kernel = Callable[..., Any]
KERNELS: dict[str, GroupKernel] = {}
_EVERY_DEVICE = "CompositeExplicitAutograd"


def define(schema: str) -> Callable[[Kernel], Kernel]:
    """Define an op by its schema; the decorated function is its kernel on every device and for simulated ranks."""
    name, _, arguments = schema.partition("(")
    position = [text.split()[1] for text in arguments.partition(")")[0].split(", ")].index("group")
    LIBRARY.define(schema)

    def kernel(function: Kernel) -> Kernel:
        group_kernel = KERNELS[name] = GroupKernel(function, position)
        LIBRARY.impl(name, lambda *args: group_kernel.run(args), _EVERY_DEVICE)
        simulate(f"{NAMESPACE}::{name}", LIBRARY, group_kernel)
        return function

    return kernel


def fake(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the op's kernel on tensors without values."""
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=LIBRARY)
