"""Compares the inputs of a planned model's forwards over `tp`, whose ranks must have the same batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from parallelize.comm.groups import Group
from parallelize.comm.handshake import check_replicas

_FIX = (
    "give the ranks of one tp group the same batch: sample by the data rank, not by the global rank; "
    "check_replicated=False turns this check off"
)


class InputCheck:
    """A forward pre-hook that compares tensor inputs, by digest.

    Args:
        every: compare in the first forward in training, in the first in evaluation, and in every n-th of each after it.

    Attributes:
        compared: whether the caller of the forward has compared the inputs, as a step does with its own message.

    Raises: HandshakeError `replicas-differ`, on every rank.
    Cost: of a forward that compares: one all-gather of 40 bytes over `tp`, which the host waits for. Not under `torch.compile`.
    """

    def __init__(self, group: Group, every: int):
        self.group, self.every = group, every
        self.compared = False
        self._forwards: Counter[bool] = Counter()

    def __deepcopy__(self, memo: dict) -> InputCheck:
        return memo.setdefault(id(self), InputCheck(self.group, self.every))

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or self.compared:
            return
        number = self._forwards[module.training]
        self._forwards[module.training] += 1
        if number % self.every:
            return
        named: dict[str, Any] = {f"input {i}": arg for i, arg in enumerate(args)} | kwargs
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        check_replicas(self.group, tensors, "inputs", fix=_FIX)
