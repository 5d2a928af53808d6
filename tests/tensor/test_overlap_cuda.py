"""Overlapped linears on CUDA: in chunks over NCCL, and by symmetric memory. Skipped, with the reason, without GPUs.

Symmetric memory may have several ranks on one device when TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; NCCL may not.
"""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as multiprocessing

pytestmark = pytest.mark.processes
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a device a rank, and there are not two"
)


def _rank(rank: int, port: int, overlap: str, backend: str) -> None:
    import torch.distributed as dist

    from parallelize import all_gather_linear, linear_all_reduce, linear_reduce_scatter
    from parallelize.comm.groups import Group

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=2)
    group = Group(dist.group.WORLD)
    random = torch.Generator().manual_seed(0)
    full = torch.randn(256, 128, generator=random).to(device)
    weights = torch.randn(2, 64, 128, generator=random).to(device)
    upstream = torch.randn(256, 64, generator=random).to(device)
    x, weight = full.chunk(2)[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    out = all_gather_linear(x, weight, group=group, overlap=overlap)
    out.backward(upstream)
    torch.testing.assert_close(out, full @ weights[rank].t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weight.grad, upstream.t() @ full, rtol=1e-3, atol=1e-2)
    dx = sum(upstream @ w for w in weights)
    torch.testing.assert_close(x.grad, dx.chunk(2)[rank], rtol=1e-3, atol=1e-2)  # type: ignore[union-attr]
    part = full.chunk(2, dim=1)[rank].contiguous()
    columns = weights[0].chunk(2, dim=1)[rank].contiguous()
    expected = full @ weights[0].t()
    own = linear_reduce_scatter(part, columns, group=group, overlap=overlap)
    torch.testing.assert_close(own, expected.chunk(2)[rank], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        linear_all_reduce(part, columns, group=group, overlap=overlap), expected, rtol=1e-3, atol=1e-3
    )
    dist.destroy_process_group()


def _run(overlap: str, backend: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_rank, (port, overlap, backend), nprocs=2)


@needs_cuda
@needs_two
@pytest.mark.parametrize("overlap", ["off", "chunked", "symm_mem"])
def test_over_nccl(overlap):
    _run(overlap, "nccl")


@needs_cuda
def test_symmetric_memory_on_one_device():
    """The matmuls and scatters that have kernels; the rest goes in chunks over the group, and needs one that carries CUDA."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device: gloo carries no CUDA messages in chunks, NCCL needs a device a rank")
    _run("symm_mem", "nccl")
