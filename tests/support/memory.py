"""Bytes that live at once: the storages that ops make, followed to their end."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.known.add(leaf.untyped_storage()._cdata)  # those that were there before count nothing
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage) -> None:
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


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that `work` holds at once in storages that it makes, gradients among them."""
    with _Storages() as storages:
        work()
    return storages.peak
