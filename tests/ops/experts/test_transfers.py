"""Tokens to the ranks of their experts and back: each message once, exact forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallelize import build_mesh
from parallelize.comm.groups import Group
from parallelize.ops.experts.routes import CallForm, routes_of
from parallelize.ops.experts.transfers import (
    Transfers,
    arrive,
    collect,
    dispatch,
    give_back,
    packed,
    start_exchange,
    unpacked,
)
from tests.support.threads import run_ranks

FORM = CallForm.of("experts", torch.ones(1, 4), torch.ones(1, 2))

EXPERTS, WIDTH, K = 5, 6, 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_bits_survive_packing(dtype, other):
    torch.manual_seed(0)
    x, y = torch.randn(3, 5).to(dtype), (torch.randn(3, 3) * 100).to(other)
    z = torch.tensor([[1], [-(1 << 31)], [(1 << 31) - 1]], dtype=torch.int32)
    for expected, actual in zip((x, y, z), unpacked(packed(x, y, z), 5, (3, other), (1, torch.int32)), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def problem(rank):
    """Rank 1 has no tokens."""
    generator, count = torch.Generator().manual_seed(rank), (4, 0, 6)[rank]
    tokens = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, K, generator=generator, dtype=torch.float64)
    choices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :K]
    return tokens.requires_grad_(), weights.requires_grad_(), choices


def scaled(tokens, weights, choices):
    """What experts that multiply by their number compute: [tokens, width]."""
    return (tokens[:, None] * (weights * (choices + 1))[..., None]).sum(1)


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_and_gradients(ranks, num_chunks):
    def body(rank):
        tokens, weights, choices = problem(rank)
        group = Group(build_mesh("cpu", ep=ranks).get_group())
        routes = routes_of(choices, EXPERTS, group, num_chunks, "experts", FORM)
        transfers = Transfers(routes, group, tokens, weights)
        returned = []
        for n, ticket in enumerate(dispatch(tokens, weights, transfers)):
            rows, row_weights, row_choices = arrive(ticket, transfers, n)
            first, stop = routes.experts
            here = (row_choices >= first) & (row_choices < stop)
            returned.append(give_back(scaled(rows, row_weights * here, row_choices), transfers, n))
        out = collect(tuple(returned), transfers)
        out.square().sum().backward()
        return out.detach(), tokens.grad, weights.grad

    for rank, actual in enumerate(run_ranks(ranks, body)):
        tokens, weights, choices = problem(rank)
        out = scaled(tokens, weights, choices)
        out.square().sum().backward()
        for value, expected in zip(actual, (out.detach(), tokens.grad, weights.grad), strict=True):
            assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)


def test_rows_that_nobody_sends():
    def body(rank):
        group = Group(build_mesh("cpu", ep=2).get_group())
        sent, received = ([0, 3], [0, 0]) if rank == 0 else ([0, 0], [3, 0])
        return start_exchange(torch.full((sum(sent), 2), 7.0), sent, received, group).wait()

    empty, full = run_ranks(2, body)
    assert empty.shape == (0, 2) and torch.equal(full, torch.full((3, 2), 7.0))


def test_shapes_without_values():
    def body(rank):
        group = Group(build_mesh("cpu", ep=2).get_group())
        return start_exchange(torch.zeros(5, 2, device="meta"), [2, 3], [1, 3], group).wait().shape

    assert run_ranks(2, body) == [(4, 2)] * 2


def test_simulated_ranks_exchange_rows():
    """All ranks in one process, each with its own rows, as many as any other."""
    local = pytest.importorskip("torch.distributed._local_tensor")
    rows = {rank: torch.arange(4.0)[:, None] + 10 * rank for rank in range(2)}
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with local.LocalTensorMode(2):
            key = Group(init_device_mesh("cpu", (2,)).get_group()).key
            out = torch.ops.parallelize.exchange_rows(local.LocalTensor(rows), [2, 2], [2, 2], key)
    finally:
        dist.destroy_process_group()
    results = [out._local_tensors[rank].flatten().tolist() for rank in range(2)]
    assert results == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


def test_dtensors_are_refused():
    def body(rank):
        mesh = build_mesh("cpu", ep=2)
        x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        with pytest.raises(NotImplementedError, match="exchange_rows"):
            torch.ops.parallelize.exchange_rows(x, [1, 1], [1, 1], Group(mesh.get_group()).key)

    run_ranks(2, body)
