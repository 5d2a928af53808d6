"""What the ranks of a pool compute on: the CPU over gloo, or with PARALLELIZE_TEST_DEVICE=cuda GPUs over NCCL.

    PARALLELIZE_TEST_DEVICE=cuda python -m pytest        # or `make gpu`: the tests of pools, and those named *_cuda.py

Fewer GPUs than ranks suffice. NCCL refuses two ranks on one GPU of a host, so that ranks which share one pretend to be
on hosts of their own (NCCL_HOSTID): messages then go through sockets. Such a run is slow and right: the same kernels,
streams and events, but no link between GPUs.

Processes that share a GPU take turns of milliseconds: an all_reduce of two ranks takes 4.5 ms. Under NVIDIA's
Multi-Process Service (`nvidia-cuda-mps-control -d`) their kernels run at the same time, and it takes 0.05 ms; but there
a rank that is killed amid a kernel, as after a test that fails, brings errors to all other processes of the GPU.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

FACTORIES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
_TORCH = str(Path(torch.__file__).parent)
_TESTS = tuple(str(Path(__file__).parents[2] / folder) for folder in ("tests", "benchmarks"))

CHOSEN = os.environ.get("PARALLELIZE_TEST_DEVICE", "cpu")
_of_this_rank = torch.device("cpu")  # of the process of pytest, too: references are computed there


def current() -> torch.device:
    """The device that models and batches of tests are on."""
    return _of_this_rank


def join(rank: int, world_size: int, timeout: timedelta) -> None:
    """Make this process a rank of the chosen device: its device, and the default process group."""
    global _of_this_rank
    if CHOSEN == "cpu":
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
        return
    gpus = torch.cuda.device_count()
    if gpus < world_size:
        _share(rank // gpus)
    _of_this_rank = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(_of_this_rank)
    with torch.device("cpu"):
        torch.empty(0)  # device contexts note PyTorch's own factories at the first call inside of one
    for name in FACTORIES.split():
        setattr(torch, name, _placing(getattr(torch, name)))
    dist.init_process_group("nccl", rank=rank, world_size=world_size, timeout=timeout)


def _share(host: int) -> None:
    """Settings of ranks of which several have one GPU. NCCL's buffers are small, because each of many groups has its
    own."""
    os.environ |= {
        "NCCL_HOSTID": f"host-{host}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MAX_CTAS": "1",
        "NCCL_BUFFSIZE": "1048576",
        "NCCL_MNNVL_ENABLE": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def _placing(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory whose tensors are on this rank's device where a test makes them, itself or as weights of a layer of
    PyTorch's.

    Not where the package makes them: one that it makes on the wrong device must fail.
    """

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        if kwargs.get("device") is not None or made.device.type != "cpu" or not _is_asked_by_a_test():
            return made
        return made.detach().to(_of_this_rank).requires_grad_(made.requires_grad)

    return make


def _is_asked_by_a_test() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)


def placed(values: Any) -> Any:
    """Tensors and modules of a nest, on the device of this rank. Those on the meta device stay."""
    return values if CHOSEN == "cpu" else tree_map(_placed, values)


def _placed(value: Any) -> Any:
    tensors = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, torch.Tensor) else []
    return value.to(_of_this_rank) if any(not tensor.is_meta for tensor in tensors) else value


def on_cpu(values: Any) -> Any:
    """Tensors of a nest, on the CPU: what a rank sends to the process of pytest."""
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) and x.is_cuda else x, values)
