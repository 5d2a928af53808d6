"""A box of a tensor, assembled from the parts of other tensors that its values are read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parallelize.base.files.boxes import Box, Part, intersection, relative_to, shape_of, slices_of, starts
from parallelize.checkpoint.format.host_memory import empty
from parallelize.checkpoint.hub.part_views import in_source_order

T = torch.Tensor
ReadBox = Callable[[str, Box, T], None]
"""(name of a tensor, box, view to fill)"""


def assembled(box: Box, dtype: torch.dtype, parts: Sequence[Part], read: ReadBox) -> T:
    """The values of a box of a tensor, read from the sources of its parts."""
    out = empty(shape_of(box), dtype)
    for part in parts:
        shared = intersection(box, part.target)
        if shared is not None:
            view = out[slices_of(relative_to(shared, starts(box)))]
            read(part.source, part.source_box(shared), in_source_order(view, part))
    return out
