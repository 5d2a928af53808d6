"""A model in another dtype."""

from __future__ import annotations

import torch
from torch import nn


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in a dtype of real numbers. Complex buffers stay complex: `Module.to` would drop their imaginary parts."""
    complex_buffers = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_complex()
    ]
    for module, key, _ in complex_buffers:
        module._buffers[key] = None
    model.to(dtype)
    for module, key, buffer in complex_buffers:
        module._buffers[key] = buffer.to(torch.promote_types(dtype, torch.complex64))
    return model
