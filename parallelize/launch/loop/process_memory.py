"""The highest memory of this process so far: of its GPU, or of the process itself."""

from __future__ import annotations

import resource
import sys

import torch


def used_bytes(device: str) -> float:
    """Bytes: of tensors on a GPU; else the resident set of the process, with Python and libraries."""
    if device.startswith("cuda"):
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
