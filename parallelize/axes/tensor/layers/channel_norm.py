"""Batch norm and group norm on this rank's channels, between a column and a row convolution.

A batch norm computes each channel by itself. Its running statistics are buffers, which are full on each rank: a rank updates those of its
channels, and the ranks exchange them in each forward in training, so that they are those of the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan

T = torch.Tensor


def check_channel_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-channel-norm` where the module computes something else than PyTorch's."""
    stock = (torch.nn.GroupNorm, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    if type(module).forward not in {cls.forward for cls in stock}:
        what = f"{fqn} is a {type(module).__name__}, whose forward is its own"
        raise ModelError(Problem("not-channel-norm", what, fix="`replicate` for it and the convolutions beside it"))


def sharded_channel_norm(module: Any, layout: Layout, group: Group) -> Callable:
    """A forward for a norm of channels. layout: of its weight."""
    if isinstance(module, torch.nn.GroupNorm):
        return _group_norm(module.num_groups, module.num_channels)
    owned = layout.owned[group.rank]
    start, stop = owned[0][0], owned[-1][1]
    return _batch_norm(start, stop, group)


def divided_statistics(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Batch norms of which no rank has a range of channels as large as that of any other, so that statistics cannot be exchanged."""
    for fqn, row in resolved.modules.items():
        weight = resolved.parameters.get(f"{fqn}.weight")
        if not row.contract.norms_channels or weight is None or weight.layout.dim is None:
            continue
        layout = weight.layout
        even = layout.shape[0] % layout.num_ranks == 0
        is_range = all(a[1] == b[0] for owned in layout.owned for a, b in pairwise(owned))
        if getattr(model.objects[fqn], "track_running_stats", False) and not (even and is_range):
            what = f"{fqn} has running statistics of {layout.shape[0]} channels, of which the ranks have no ranges of one size"
            fix = f"a tp size that divides them, or `replicate` for {fqn} and the convolutions beside it"
            yield Problem("divided-statistics", what, row.rule.where, fix=fix)


def _group_norm(num_groups: int, num_channels: int) -> Callable:
    def forward(self: Any, x: T) -> T:
        weight, bias = _parameters(self)
        return F.group_norm(x, x.shape[1] * num_groups // num_channels, weight, bias, self.eps)

    return forward


def _batch_norm(start: int, stop: int, group: Group) -> Callable:
    """[start, stop): this rank's channels."""

    def forward(self: Any, x: T) -> T:
        self._check_input_dim(x)
        weight, bias = _parameters(self)
        mean, var = self.running_mean, self.running_var
        from_batch = self.training or mean is None
        if mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        updates = self.training and self.track_running_stats
        # backward saves them, and the buffers are written below
        mean, var = mean[start:stop].clone(), var[start:stop].clone()
        out = F.batch_norm(x, mean, var, weight, bias, from_batch, _momentum(self, updates), self.eps)
        if updates:
            _exchange(self, mean, var, group)
        return out

    return forward


def _momentum(module: Any, updates: bool) -> float:
    """Counts a batch, as PyTorch does. Without a momentum the statistics are the mean over all batches."""
    if updates and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if module.momentum is not None:
        return float(module.momentum)
    return 1.0 / float(module.num_batches_tracked) if updates else 0.0


@torch.no_grad()
def _exchange(module: Any, mean: T, var: T, group: Group) -> None:
    """Each rank's statistics to all ranks, in one collective."""
    both = ops.gather(torch.stack((mean, var)), group=group, dim=-1, full=module.num_features, gradient="replicate")
    module.running_mean.copy_(both[0])
    module.running_var.copy_(both[1])


def _parameters(module: Any) -> tuple[T | None, T | None]:
    planned, parameters = module._applied.planned, module._parameters
    slots = {slot.key: slot.local(parameters) for slot in planned.slots}
    return slots.get("weight"), slots.get("bias")
