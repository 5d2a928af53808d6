"""A state-space mixer on this rank's channels or heads: its own forward, on local shards of its parameters and its
children's.

Mixers of `transformers` read weights of their children, and in training first try a fused kernel that includes the
output projection, whose result on shards would be a part of the sum, without the reduction. The kernel is left out: the
mixer runs as it does in evaluation, step by step, with kernels for the convolution and the scan where they are
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelize.axes.tensor.planned_forward import reading_children


def scan_forward(children: tuple[str, ...]) -> Callable[..., Any]:
    """A forward of a mixer that reads parameters of these children."""
    stock = reading_children(children)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        self.training = False  # of the mixer alone: it has no dropout of its own
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.training = training

    return forward
