"""Which tokens go to which rank."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh
from parallelize.base.layout import balanced_interval
from parallelize.comm.groups import Group
from parallelize.ops.experts.routes import CallForm, routes_of
from tests.support.threads import run_ranks

FORM = CallForm.of("experts", torch.ones(1, 4), torch.ones(1, 2))


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 6), (3, 7), (4, 5)])
def test_each_token_goes_once_to_each_rank_of_its_experts(ranks, experts, num_chunks):
    generator = torch.Generator().manual_seed(0)
    choices = [
        torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(5 + n)]) for n in range(ranks)
    ]
    owned = [range(*balanced_interval(experts, ranks, rank)) for rank in range(ranks)]

    def body(rank):
        group = Group(build_mesh("cpu", ep=ranks).get_group())
        return routes_of(choices[rank], experts, group, num_chunks, "experts", FORM)

    routes = run_ranks(ranks, body)
    for source, route in enumerate(routes):
        assert route.experts == balanced_interval(experts, ranks, source)
        for target in range(ranks):
            sent = []
            for chunk in route.chunks:
                start = sum(chunk.sent[:target])
                sent += chunk.rows[start : start + chunk.sent[target]].tolist()
            assert sent == [t for t, chosen in enumerate(choices[source].tolist()) if {*chosen} & {*owned[target]}]
            for mine, theirs in zip(route.chunks, routes[target].chunks, strict=True):
                assert mine.sent[target] == theirs.received[source]
    for rank, route in enumerate(routes):
        pairs = sum(int(sum(c in owned[rank] for c in row)) for part in choices for row in part.tolist())
        assert sum(chunk.pairs for chunk in route.chunks) == pairs


def test_every_part_of_an_expert_gets_its_tokens():
    choices = torch.tensor([[0, 1], [3, 4], [2, 5]])

    def body(rank):
        group = Group(build_mesh("cpu", ep=4).get_group())
        return routes_of(choices, 6, group, 1, "experts", FORM, 2)

    for rank, route in enumerate(run_ranks(4, body)):
        assert route.experts == ((0, 3), (3, 6))[rank % 2]
        assert route.chunks[0].sent == [2, 2, 2, 2] and route.chunks[0].rows.tolist() == [0, 2, 1, 2] * 2
        assert route.chunks[0].received == [2] * 4 and route.chunks[0].pairs == 12


@pytest.mark.parametrize(("etp", "rows", "pairs"), [(1, 4, 16), (2, 8, 32), (4, 8, 64)])
def test_tokens_without_values_are_divided_evenly(etp, rows, pairs):
    def body(rank):
        group = Group(build_mesh("cpu", ep=4).get_group())
        return routes_of(torch.zeros(8, 2, dtype=torch.int64, device="meta"), 8, group, 1, "experts", FORM, etp)

    chunk = run_ranks(4, body)[0].chunks[0]
    assert (chunk.sent, chunk.received, chunk.pairs) == ([rows] * 4, [rows] * 4, pairs)
