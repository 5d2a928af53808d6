"""Recompute in real processes: `fully_shard` around units, what a unit sends itself, and compiled units."""

from __future__ import annotations

import pytest

from tests.axes.recomputation import recompute_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("mixed", "inner"), [(False, False), (True, False), (False, True)], ids=["fp32", "mixed", "inner"]
)
def test_fully_shard(four_processes, when, mixed, inner):
    """Bit for bit what it is without recompute; two layers, two steps, each replayed."""
    for result in four_processes.run(jobs.fully_sharded, when, mixed, inner):
        assert result == [(0, 4, 4)] * 3


def test_a_units_own_functional_collectives(two_processes):
    assert two_processes.run(jobs.functional) == [[(0, 0), (0, 1), (0, 0)]] * 2


def test_what_is_kept_is_what_is_reported(two_processes):
    rows = [2 * 40 * 48 * 4, 2 * 20 * 48 * 4]  # gathered, and own rows of sums, in fp32
    for more, reported in two_processes.run(jobs.saved):
        assert more == reported == 6 * 2 * sum(rows)


@pytest.mark.sweep
@pytest.mark.parametrize("fullgraph", [False, True], ids=["layer", "fullgraph"])
def test_compiled_units(two_processes, fullgraph):
    """As one graph, which sends no more than it has to."""
    for plain, full, collectives, selective in two_processes.run(jobs.compiled, fullgraph):
        assert max(result[0] for result in (plain, full, collectives, selective)) < 1e-12
        assert plain[1:] == ({"all_reduce": 2}, True)
        assert full[1:] == ({"all_reduce": 4}, True)
        assert collectives[1:] == selective[1:] == ({"all_reduce": 2}, True)
