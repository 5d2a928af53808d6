"""The pool of ranks: silence is shown, and ends the pool instead of the tests after it."""

from __future__ import annotations

import os
import time

import pytest


def answers(rank):
    return rank, os.getpid()


def waits_on_rank_one(rank):
    if rank == 1:
        time.sleep(3600)


def test_a_silent_rank_shows_where_it_waits_and_the_next_job_has_a_fresh_pool(two_processes):
    before = two_processes.run(answers)
    with pytest.raises(AssertionError, match=r"rank 1: no answer in 2.0 s(?s:.)*waits_on_rank_one"):
        two_processes.run(waits_on_rank_one, timeout_s=2.0)
    assert not set(before) & set(two_processes.run(answers))
