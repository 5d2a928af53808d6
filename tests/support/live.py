"""Bytes that a model keeps from its forward for its backward."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import tiny_batch
from tests.support.parity import loss_of


class Live(TorchDispatchMode):
    """Storages that ops have made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def num_bytes(self, beside: nn.Module) -> int:
        own = {p.untyped_storage()._cdata for p in (*beside.parameters(), *beside.buffers())}
        return sum(size for key, (ref, size) in self.made.items() if key not in own and not ref.expired())


def saved_bytes(net: nn.Module) -> tuple[int, int]:
    """(bytes alive between forward and backward, and after both), without any help of the garbage collector."""
    ids, labels = tiny_batch(length=40)
    gc.collect()
    gc.disable()
    try:
        with Live() as live:
            loss = loss_of(net(input_ids=ids).logits, labels)
            between = live.num_bytes(net)
            loss.backward()
            net.zero_grad()
            del loss
            return between, live.num_bytes(net)
    finally:
        gc.enable()
