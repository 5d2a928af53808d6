"""Which tensors of the model have changed since the last complete export: by the digests of what each rank owns."""

from __future__ import annotations

import torch
from blake3 import blake3

from parallelize.checkpoint.export.local_values import LocalValues, Values
from parallelize.checkpoint.format.device_pieces import bytes_of

T = torch.Tensor
_BLOCK_BYTES = 64 << 20
Digests = dict[str, bytes]


@torch.no_grad()
def digests_of(local: LocalValues, values: Values) -> Digests:
    """Name in the model -> digest of the elements that this rank owns: exact, whatever has written them."""
    return {name: _digest(views) for name, views in local.owned(values)}


def _digest(values: list[T]) -> bytes:
    hasher = blake3()
    for value in values:
        flat = value.detach().reshape(-1)
        size = max(1, _BLOCK_BYTES // flat.element_size())
        for block in flat.split(size) if flat.numel() else ():  # in blocks, because of the copy from an accelerator
            hasher.update(bytes_of(block.cpu().contiguous()))
    return hasher.digest()


def changed_names(before: Digests, now: Digests) -> list[str]:
    """The names whose digests differ, or that are new."""
    return [name for name, digest in now.items() if before.get(name) != digest]
