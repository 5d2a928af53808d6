"""Bytes that live at once: the storages that ops make, followed to their end. No allocator of the CPU tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelize.groups import Group
from parallelize.ops import library


class _Storages(TorchDispatchMode):
    """Counts what is made while it is on. What was there before counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.known.add(leaf.untyped_storage()._cdata)
        if func.namespace == library.NAMESPACE and func._schema.name.partition("::")[2] in library.KERNELS:
            out = self._in_sight(func, args)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf.untyped_storage())
        return out

    def _in_sight(self, func: Any, args: tuple) -> Any:
        """One of our own ops, whose kernel would hide from modes what it makes on the way."""
        name = func._schema.name.partition("::")[2]
        group = Group.by_key(library.group_key(name, args))
        with self:
            return library.KERNELS[name](*library.with_group(name, args, group))

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[], object], tries: int = 1, before: Iterable[Callable[[], object]] = ()) -> int:
    """The most bytes that `work` holds at once in storages that it makes; the least of several tries.

    Args:
        before: called before each try, not counted.
    """
    found = []
    for _ in range(tries):
        for prepare in before:
            prepare()
        with _Storages() as storages:
            work()
        found.append(storages.peak)
    return min(found)
