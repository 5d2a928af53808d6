"""The live bytes of this process: of every storage that exists, or that an operation makes, until it is freed.

Counted from outside. It knows nothing of what predicts memory, nor of who holds a storage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from parallelize.ops import library


class StorageMode(TorchDispatchMode):
    """Follows every storage that ops allocate, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._serials: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == library.NAMESPACE:  # dispatch modes do not see allocations inside of the op
            name = func._schema.name.partition("::")[2]
            group = library.KERNELS[name].group(args)
            with self:
                return library.KERNELS[name].run(args, group)
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):  # a DTensor has no bytes
                self.follow(leaf.untyped_storage())
        return out

    def __enter__(self) -> StorageMode:
        stock = self._stock = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:  # `fully_shard` frees storages by this
            out = stock(storage, size)
            self._resized(storage)
            return out

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._stock
        super().__exit__(*error)

    def follow(self, storage: Any) -> None:
        """Count a storage from now on, once."""
        if storage._cdata not in self._serials and storage.nbytes():
            serial = len(self.events) + 1
            self._serials[storage._cdata] = serial
            self._sizes[serial] = storage.nbytes()
            self.events.append((serial, storage.nbytes()))
            weakref.finalize(storage, self._freed, storage._cdata, serial)

    def _resized(self, storage: Any) -> None:
        serial = self._serials.get(storage._cdata)
        if serial is None:
            self.follow(storage)
        else:
            self.events.append((serial, storage.nbytes() - self._sizes.get(serial, 0)))
            self._sizes[serial] = storage.nbytes()

    def _freed(self, key: int, serial: int) -> None:
        self._serials.pop(key, None)
        self.events.append((serial, -self._sizes.pop(serial)))

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        for x in tensors:
            self._serials[x.untyped_storage()._cdata] = 0

    def serials_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Of those whose storages were allocated while this followed them."""
        return {serial for x in tensors if (serial := self._serials.get(x.untyped_storage()._cdata))}

    def peak(self, without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        now = most = 0
        for serial, size in self.events:
            now += 0 if serial in without else size
            most = max(most, now)
        return most


def existing_tensors() -> list[torch.Tensor]:
    """All plain tensors of this process that have values."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return [each for each in tensors if not is_traceable_wrapper_subclass(each) and each.device.type != "meta"]


def live_peak(work: Callable[[], object], older: Iterable[torch.Tensor], tries: int = 3) -> int:
    """The peak of live bytes while `work` runs, the smallest of several tries: what the garbage collector or a thread
    of gloo has not freed yet counts in some.

    older: tensors that do not count, such as those from before the model was built, and its inputs.
    """
    peaks = []
    for _ in range(tries):
        mode = StorageMode()
        mode.ignore(older)
        for tensor in existing_tensors():
            mode.follow(tensor.untyped_storage())
        with mode:
            work()
        peaks.append(mode.peak())
    return min(peaks)
