"""The values that `torch.nn.utils.parametrize.cached` keeps, which PyTorch has once for a process: here once for each
thread.

A block of one thread would otherwise find values of another one's block, or those of its own earlier block, which stay
as long as any thread is in one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.nn.utils import parametrize


def of_each_thread() -> tuple[ModuleType, dict[str, Any]]:
    """(PyTorch's module, its names and what they are to be while ranks are threads)."""
    values = _CachedOfThread()

    @contextmanager
    def cached() -> Iterator[None]:
        values.depth += 1
        try:
            yield
        finally:
            values.depth -= 1
            if not values.depth:
                values.by_parameter.clear()

    return parametrize, {"cached": cached, "_cache": values, "_cache_enabled": values}


class _CachedOfThread(threading.local):
    """What a thread has cached, and, as a truth value, whether it is in a block."""

    def __init__(self) -> None:
        self.depth = 0
        self.by_parameter: dict[tuple[int, str], Any] = {}

    def __bool__(self) -> bool:
        return self.depth > 0

    def get(self, key: tuple[int, str]) -> Any:
        return self.by_parameter.get(key)

    def __setitem__(self, key: tuple[int, str], value: Any) -> None:
        self.by_parameter[key] = value
