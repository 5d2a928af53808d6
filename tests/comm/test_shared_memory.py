"""Sums and gathers through shared memory are those of a loop over the ranks; where one rank rules it out, no rank uses
it."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from parallelize import HandshakeError
from parallelize.comm.groups import Group
from parallelize.comm.same_host import through_shared_memory
from parallelize.comm.shared_memory import SharedMemory, file_bytes, is_supported
from tests.comm import shared_memory_jobs as jobs

pytestmark = [
    pytest.mark.on_cpus("memory of one host that gloo shares"),
    pytest.mark.skipif(not is_supported(), reason="no /dev/shm, or stores that other processors see in another order"),
]


@pytest.mark.processes
def test_results_of_four_ranks(four_processes):
    assert four_processes.run(jobs.all_wrong, 4) == [[]] * 4


@pytest.mark.processes
def test_results_of_two_ranks_that_are_late_by_turns(two_processes):
    assert two_processes.run(jobs.late_ranks, 2, 2000) == [0, 0]


@pytest.mark.processes
@pytest.mark.sweep
def test_results_of_four_ranks_that_are_late_by_turns(four_processes):
    assert four_processes.run(jobs.late_ranks, 4, 20_000) == [0] * 4


@pytest.mark.processes
@pytest.mark.parametrize("reason", ["watch", "counting"])
def test_one_rank_rules_it_out_for_all(two_processes, reason):
    assert two_processes.run(jobs.ruled_out_by_one_rank, reason) == [(False, 3.0, True)] * 2


@pytest.mark.processes
def test_a_rank_that_cannot_map_the_file(two_processes):
    assert two_processes.run(jobs.no_memory_on_one_rank) == [(False, 6.0, False)] * 2
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("parallelize-")]


@pytest.mark.processes
@pytest.mark.parametrize("leaves", [False, True], ids=["late", "leaves"])
def test_a_rank_that_does_not_come(two_processes, leaves):
    (slug, first), (_, second) = two_processes.run(jobs.one_does_not_come, leaves)
    assert slug.startswith(
        "ranks-missing rank 1 of the group " + ("has ended" if leaves else "did not come within 1 s")
    )
    assert (first, second) == (3.0, 3.0)


def test_a_rank_whose_process_has_ended():
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), file_bytes(2))
        memory = SharedMemory(os.dup(file.fileno()), 0, 2, 60.0)
        with pytest.raises(HandshakeError, match="ranks-missing: rank 1 of the group has ended, or has left"):
            memory.reduce(torch.ones(2))  # nobody has locked that rank's byte


def test_one_rank_shares_nothing():
    with through_shared_memory(Group.alone(), "cpu"):
        assert not SharedMemory.active
