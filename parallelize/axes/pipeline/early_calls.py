"""Modules of a stage that a forward calls before the stage begins: what they compute there has no gradient, in silence.

A tower whose blocks are divided, and an embedding that runs before it, are such a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def watched(units: Iterable[tuple[str, nn.Module]], has_begun: Callable[[], bool]) -> Iterator[list[str]]:
    """Note the names of modules with trained parameters that are called too early, in the list that is yielded.

    Args:
        units: of the stage, by name; those that follow one another are checked where they are called, so that modules
            inside of them are watched. has_begun: whether the first unit was called.
    """
    names: list[str] = []
    with ExitStack() as stack:
        for unit, module in units:
            for name, inner in module.named_modules(prefix=unit):
                if name != unit and any(p is not None and p.requires_grad for p in inner._parameters.values()):
                    note = partial(_note, name, names, has_begun)
                    stack.callback(inner.register_forward_pre_hook(note).remove)
        yield names


def _note(name: str, names: list[str], has_begun: Callable[[], bool], *_: Any) -> None:
    if not has_begun() and name not in names:
        names.append(name)
