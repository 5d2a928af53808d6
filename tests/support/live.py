"""Bytes that a model saves in its forward for its backward."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import tiny_batch
from tests.support.parity import loss_of


class Live(TorchDispatchMode):
    """Storages that ops have allocated and that still exist."""

    def __init__(self):
        super().__init__()
        self.allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.allocated[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def num_bytes(self, without: nn.Module) -> int:
        own = {p.untyped_storage()._cdata for p in (*without.parameters(), *without.buffers())}
        return sum(size for key, (ref, size) in self.allocated.items() if key not in own and not ref.expired())


def saved_bytes(net: nn.Module) -> tuple[int, int]:
    """(bytes that exist between forward and backward, and after both), with the garbage collector off."""
    ids, labels = tiny_batch(length=40)
    gc.collect()
    gc.disable()
    try:
        with Live() as live:
            loss = loss_of(net(input_ids=ids).logits, labels)
            _wait_for_gloo()
            between = live.num_bytes(net)
            loss.backward()
            net.zero_grad()
            del loss
            _wait_for_gloo()
            return between, live.num_bytes(net)
    finally:
        gc.enable()


def _wait_for_gloo() -> None:
    """Its threads release the tensors of an op some time after the op is done."""
    if dist.is_initialized():
        time.sleep(0.3)
