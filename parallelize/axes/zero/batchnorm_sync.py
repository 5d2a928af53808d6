"""Running statistics of normalizations, such as `nn.BatchNorm1d`: after a backward all data ranks have those of the first.

Each rank updates them with its own samples, so that replicas would drift apart, and a checkpoint would depend on the rank that
writes it. The first rank's are an estimate from its samples, as under DistributedDataParallel. Training itself does not read
them.
"""

from __future__ import annotations

import torch
from torch import nn

from parallelize.comm.groups import Group

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormSync:
    """The running statistics of a model.

    Args:
        module: the root. Modules with a buffer `running_mean` have them.
        group: the ranks along all data axes.
    """

    def __init__(self, module: nn.Module, group: Group):
        self.group = group
        self._owners = [owner for owner in module.modules() if owner._buffers.get("running_mean") is not None]

    @torch.no_grad()
    def share(self) -> None:
        """Overwrite them with those of the first rank. One broadcast; nothing is sent for a model without any."""
        in_order = [owner._buffers.get(name) for owner in self._owners for name in _NAMES]
        buffers = [buffer for buffer in in_order if buffer is not None]
        if self.group.size == 1 or not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])  # exact, also for counts
        self.group.broadcast(flat, 0)
        if self.group.rank > 0:
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
