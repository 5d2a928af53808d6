"""One rank's tensors on every rank of its group, many of them in one message.

A broadcast costs a latency whatever it sends, and most parameters of a model are small: norms and biases. Messages are
bounded in bytes, because a message is a copy of its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallelize.comm.groups import Group

MESSAGE_BYTES = 64 << 20
"""Most bytes of a message of several tensors. A larger tensor is a message of its own."""


def messages(
    tensors: Sequence[torch.Tensor], groups: Sequence[Group], most_bytes: int = MESSAGE_BYTES
) -> list[list[int]]:
    """The indices of the tensors that are sent together: of one group and dtype, in order.

    Args:
        tensors: of any shapes, the same on every rank. groups: the group of each.

    Returns: lists of indices. Subclasses of tensors, whose memory torch cannot see, are alone.
    """
    done: list[list[int]] = []
    filling: dict[tuple[Group, torch.dtype], tuple[list[int], int]] = {}
    for index, (tensor, group) in enumerate(zip(tensors, groups, strict=True)):
        if type(tensor) is not torch.Tensor:
            done.append([index])
            continue
        indices, filled = filling.get((group, tensor.dtype), ([], 0))
        size = tensor.numel() * tensor.element_size()
        if not indices or filled + size > most_bytes:
            indices, filled = [], 0
            done.append(indices)
        indices.append(index)
        filling[group, tensor.dtype] = indices, filled + size
    return done


def broadcast_together(
    tensors: Sequence[torch.Tensor], group: Group, source: int, device: torch.device | str
) -> list[torch.Tensor]:
    """The tensors of the group's rank `source`, contiguous and on `device`. The given ones are not changed.

    Args:
        tensors: those of one entry of `messages`.

    Returns: views of one new tensor: copy those that are stored.
    Cost: one broadcast. Memory: one copy of the tensors.
    """
    if len(tensors) == 1:
        value = tensors[0].to(device).clone(memory_format=torch.contiguous_format)
        group.broadcast(value, source)
        return [value]
    sizes = [tensor.numel() for tensor in tensors]
    message = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=device)
    values = [part.view(tensor.shape) for part, tensor in zip(message.split(sizes), tensors, strict=True)]
    if group.rank == source:
        for value, tensor in zip(values, tensors, strict=True):
            value.copy_(tensor)
    group.broadcast(message, source)
    return values
