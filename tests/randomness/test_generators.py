"""The states of generators are made equal over a group, and restored."""

from __future__ import annotations

import pytest

from tests.randomness import generator_jobs


@pytest.mark.parametrize("source", [0, 1])
def test_ranks_of_a_group_continue_from_the_state_of_one_of_them(four_processes, source):
    drawn = four_processes.run(generator_jobs.synchronized, source)
    own = [result["own"] for result in drawn]
    assert len(set(own)) == 4
    assert [result["tp"] for result in drawn] == [own[source]] * 2 + [own[2 + source]] * 2
    assert [result["own again"] for result in drawn] == own
    assert len({result["all"] for result in drawn}) == 1
