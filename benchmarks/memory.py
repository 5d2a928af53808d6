"""Peak memory of the storages that ops allocate. The CPU allocator does not report it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelize.ops import library


class _Storages(TorchDispatchMode):
    """Counts the storages that are allocated inside. Storages from before are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.known.add(leaf.untyped_storage()._cdata)
        if func.namespace == library.NAMESPACE and func._schema.name.partition("::")[2] in library.KERNELS:
            out = self._run_kernel(func, args)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _run_kernel(self, func: Any, args: tuple) -> Any:
        """Run an op of this package with the mode on: modes do not see what an op's kernel allocates."""
        with self:
            return library.KERNELS[func._schema.name.partition("::")[2]].run(args)

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[], object], tries: int = 1, before: Iterable[Callable[[], object]] = ()) -> int:
    """The peak bytes in storages that `work` allocates; the smallest of several tries.

    Args:
        before: called before each try, not counted.
    """
    peaks = []
    for _ in range(tries):
        for prepare in before:
            prepare()
        with _Storages() as storages:
            work()
        peaks.append(storages.peak)
    return min(peaks)
