"""Overlapped linears on GPUs: in chunks over NCCL, and by symmetric memory. `tests.support.device` says how few GPUs
suffice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelize import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from parallelize.comm.groups import Group
from tests.support import device

pytestmark = pytest.mark.skipif(device.CHOSEN != "cuda", reason="PARALLELIZE_TEST_DEVICE=cuda runs it")


def _ops(rank: int, overlap: str, dtype: torch.dtype, limit: float) -> None:
    group = Group(dist.group.WORLD)
    random = torch.Generator().manual_seed(0)
    full, upstream = torch.randn(256, 128, generator=random), torch.randn(256, 64, generator=random)
    weights = torch.randn(2, 64, 128, generator=random)
    expected = full @ weights[0].t()

    def close(actual: torch.Tensor, reference: torch.Tensor) -> None:
        assert (actual.double() - reference.double()).abs().max() <= limit * reference.double().abs().max()

    x, weight = (t.to(dtype).requires_grad_() for t in (full.chunk(2)[rank], weights[rank]))
    out = all_gather_linear(x, weight, group=group, overlap=overlap)
    out.backward(upstream.to(dtype))
    close(out, full @ weights[rank].t())
    close(weight.grad, upstream.t() @ full)
    close(x.grad, sum(upstream @ w for w in weights).chunk(2)[rank])
    part, columns = (t.chunk(2, dim=1)[rank].contiguous().to(dtype) for t in (full, weights[0]))
    close(linear_reduce_scatter(part, columns, group=group, overlap=overlap), expected.chunk(2)[rank])
    close(linear_all_reduce(part, columns, group=group, overlap=overlap), expected)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("overlap", ["off", "chunked", "symm_mem"])
def test_ops(two_processes, overlap, dtype, limit):
    two_processes.run(_ops, overlap, dtype, limit)
