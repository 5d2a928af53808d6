"""A rank that ends before it comes to a handshake is named at once, with its error; so is another mesh. Without a
watch."""

from __future__ import annotations

import re

import pytest

from tests.comm.handshake_jobs import another_mesh, one_ends_before
from tests.support.failing_ranks import run_ranks


@pytest.mark.processes
@pytest.mark.parametrize("ending", [1, pytest.param(0, marks=pytest.mark.sweep)])
def test_the_error_of_a_rank_ends_the_wait_of_the_other(ending, tmp_path):
    ended = run_ranks(2, tmp_path, one_ends_before, ending)
    text = ended[1 - ending].text
    assert "rank-failed" in text and f"rank {ending} ended before it called" in text and "boom before planning" in text
    assert float(re.findall(r"waited ([\d.]+) s", text)[0]) < 30


@pytest.mark.processes
@pytest.mark.sweep
def test_another_mesh_of_the_same_ranks(tmp_path):
    for end in run_ranks(2, tmp_path, another_mesh):
        assert "ranks-disagree" in end.text and "dp=2" in end.text and "tp=2" in end.text, end.text
