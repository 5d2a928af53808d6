"""The class that a module had before `fully_shard` gave it one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class, or, after `fully_shard`, the class that it had before."""
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


@contextmanager
def stock_classes(module: nn.Module) -> Iterator[None]:
    """Inside, every module has its stock class: libraries look up what they know by the name of a class."""
    changed = [(inner, type(inner)) for inner in module.modules() if isinstance(inner, FSDPModule)]
    for inner, _ in changed:
        inner.__class__ = class_of(inner)  # type: ignore[assignment]
    try:
        yield
    finally:
        for inner, cls in changed:
            inner.__class__ = cls
