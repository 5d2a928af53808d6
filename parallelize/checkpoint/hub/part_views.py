"""Views of what is filled, with the dims of the tensor that is read into them."""

from __future__ import annotations

import torch

from parallelize.base.files.boxes import Part

T = torch.Tensor


def in_source_order(view: T, part: Part) -> T:
    """A view of a part of the target, with the dims of the source in their order."""
    used = [dim for dim in part.dims if dim is not None]
    for dim in reversed(range(view.ndim)):
        if dim not in used:
            view = view.squeeze(dim)
    order = sorted(used)
    view = view.permute([order.index(dim) for dim in used])
    for source_dim, target_dim in enumerate(part.dims):
        if target_dim is None:
            view = view.unsqueeze(source_dim)
    return view
