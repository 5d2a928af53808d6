"""Tables of tensors that keep none of them alive, and let `.to()` and casts of a module replace them.

PyTorch swaps a DTensor with its cast copy in place: the object stays, its attributes go with the old tensor, and an
object that somebody refers to weakly is not swapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from parallelize.state.records import mark_of, mark_parameter

V = TypeVar("V")
_TABLES: list[TensorTable[Any]] = []


class TensorTable(Generic[V]):
    """Tensor -> value, by identity: tensors compare elementwise."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}
        _TABLES.append(self)

    def __setitem__(self, tensor: Any, value: V) -> None:
        number = id(tensor)
        self._entries[number] = weakref.ref(tensor, lambda _: self._entries.pop(number, None)), value

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Any) -> V | None:
        reference, value = self._entries.get(id(tensor), (None, None))
        return value if reference is not None and reference() is tensor else None

    def pop(self, tensor: Any) -> V | None:
        value = self.get(tensor)
        if value is not None:
            del self._entries[id(tensor)]
        return value

    def tensors(self) -> list[Any]:
        return [tensor for reference, _ in list(self._entries.values()) if (tensor := reference()) is not None]


@contextmanager
def swappable(parameters: Iterable[Any]) -> Iterator[None]:
    """Within the block no table refers to these parameters; after it, tables and marks are as they were."""
    rows = []
    for parameter in parameters:
        entries = [(table, value) for table in _TABLES if (value := table.pop(parameter)) is not None]
        rows.append((parameter, mark_of(parameter), entries))
    try:
        yield
    finally:
        for parameter, mark, entries in rows:
            if mark != mark_of(parameter):
                mark_parameter(parameter, **mark._asdict())
            for table, value in entries:
                table[parameter] = value
