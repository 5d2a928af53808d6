"""Where more arithmetic is cheaper than to wait for a count.

On a CPU the few candidates that matter are selected first. On a GPU the host would wait for their number, once for each selection,
and a CUDA graph cannot contain that. There a moderate number of candidates is computed in full. The results are the same.
"""

from __future__ import annotations

import torch

_MAX_CANDIDATES = 1 << 20  # float64 numbers that a GPU's kernel reads in about the time of its start


def avoids_waits(device: torch.device, count: int) -> bool:
    """Whether functions of `count` candidates on this device compute all of them instead of selecting some.

    Where ranks communicate, `count` is the same on all of them.
    """
    return device.type != "cpu" and count <= _MAX_CANDIDATES
