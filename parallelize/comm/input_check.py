"""Compares the inputs of a planned model's forwards, and the targets of losses of sharded logits, over `tp`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from parallelize.comm.groups import Group
from parallelize.comm.handshake import check_replicas

_FIX = (
    "give the ranks of one tp group the same batch: GlobalBatches(len(dataset), size, mesh=mesh) does, DistributedSampler and "
    "accelerate's prepare divide over all processes unless told otherwise (`check_loader(loader, mesh)` tells); "
    "check_replicated=False turns this check off"
)


class InputCheck:
    """A forward pre-hook that compares tensor inputs, by digest: the ranks of a tp group must have the same batch.

    Args:
        every: compare in the first forward in training, in the first in evaluation, and in every n-th of each after it.
            Targets are counted by themselves, with and without gradients. 1 compares all tensors; otherwise those of integers
            and booleans, such as ids and masks, because hidden states may be shards where a part of a model is called.

    Attributes:
        compared: whether the caller of the forward has compared the inputs, as a step does with its own message.

    Raises: HandshakeError `replicas-differ`, on every rank.
    Cost: of a forward that compares: one all-gather of 40 bytes over `tp`, which the host waits for. Not under `torch.compile`.
    """

    def __init__(self, group: Group, every: int):
        self.group, self.every = group, every
        self.compared = False
        self._calls: Counter[tuple[str, bool]] = Counter()

    def __deepcopy__(self, memo: dict) -> InputCheck:
        return memo.setdefault(id(self), InputCheck(self.group, self.every))

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.compare("inputs", {f"input {i}": arg for i, arg in enumerate(args)} | kwargs, module.training)

    def compare(self, what: str, named: dict[str, Any], training: bool) -> None:
        """Compare those of these values that are tensors, if it is their turn. Calls are counted by `what` and `training`."""
        if torch.compiler.is_compiling() or self.compared:
            return
        number = self._calls[what, training]
        self._calls[what, training] += 1
        if number % self.every == 0:
            tensors = {name: value for name, value in named.items() if self._is_compared(value)}
            check_replicas(self.group, tensors, what, fix=_FIX)

    def _is_compared(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (self.every == 1 or not value.is_floating_point())
