"""Modules whose code reads the parameters of their children, where it would find DTensors."""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def reads_of_children(cls: Any) -> tuple[tuple[str, str], ...]:
    """(child, parameter) pairs whose values the code of a class uses, as in `F.conv1d(x, self.conv.weight)`.

    The source text is searched. Reading only a parameter's dtype, device or shape does not count.
    """
    pairs: list[tuple[str, str]] = []
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and name not in _NOT_FORWARD:
            try:
                pairs += _CHILD_READ.findall(inspect.getsource(member))
            except OSError:  # no source to read
                continue
    return tuple(dict.fromkeys(pairs))


_NOT_FORWARD = {"__init__", "reset_parameters", "_init_weights", "tie_weights", "extra_repr", "_tie_weights"}
_CHILD_READ = re.compile(
    r"self\.(\w+)\.(weight|bias)\b(?!\s*\.(?:dtype|device|shape|size|ndim|requires_grad)|\s*(?:is|==|=))"
)
