"""Whether this package's own kernels serve logits: on a GPU where Triton works, outside of compiled graphs.

In a compiled graph the compiler fuses PyTorch's ops.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from parallelize.base.errors import warn_caller
from parallelize.base.torch_private.torch_dynamo import traces_graph

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)


def kernels_for(z: torch.Tensor) -> ModuleType | None:
    """`logit_kernels` if it serves logits z [n, V/P], else None."""
    if not z.is_cuda or z.dtype not in _DTYPES or not z.numel() or z.stride(-1) != 1:
        return None
    if type(z) not in _PLAIN or traces_graph():
        return None  # a stand-in without storage, or a tensor that is not only its storage
    return _tried_kernels(z.device, z.dtype)


@cache
def _tried_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The kernels, after a first call of each: Triton needs a C compiler, and a GPU that it knows and that has the
    dtype."""
    try:
        from parallelize.ops.vocabulary import logit_kernels

        logit_kernels.try_out(torch.zeros(1, 1, device=device, dtype=dtype))
    except Exception as error:
        what = (
            f"losses run PyTorch's kernels, which take more time and memory, because Triton's fail on {device} in "
            f"{dtype}"
        )
        warn_caller(f"{what}: {type(error).__name__}: {error}", RuntimeWarning)
        return None
    return logit_kernels
