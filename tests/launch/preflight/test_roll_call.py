"""The roll call: who is missing is named, what differs is named by rank, the same on every rank."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from parallelize.base.errors import LaunchError
from parallelize.launch.environment.launcher import Launcher
from parallelize.launch.preflight.roll_call import facts_of_rank, rank_store, remarks, roll_call
from tests.support.processes import free_port

FACTS = {"host": "a", "device": "cpu", "threads": "1", "torch": "2.13", "python": "3.11", "parallelize": "0.1"}
FACTS |= {"code": "c", "model code": "m", "run": "r", "ranks": "3"}


class CountingStore:
    """A store that notes the longest value, and counts requests by thread."""

    def __init__(self):
        self.store, self.requests, self.longest = dist.HashStore(), {}, 0

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def counted(*args):
            thread = threading.get_ident()
            self.requests[thread] = self.requests.get(thread, 0) + 1
            self.longest = max([self.longest, *(len(value) for value in args if isinstance(value, str))])
            return method(*args)

        return counted


def call(changes: dict[int, dict[str, str]], absent=(), limit_s=0.3):
    """What each present rank of three gets: facts or problems."""
    store, results = dist.HashStore(), {}

    def one_rank(rank):
        facts = {**FACTS, "slot": f"slot {rank}", **changes.get(rank, {})}
        try:
            results[rank] = roll_call(store, rank, 3, facts, host_of=lambda rank: f"node{rank}", limit_s=limit_s)
        except LaunchError as error:
            results[rank] = error

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(3) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_that_agree_get_all_facts():
    results = call({})
    assert results[0][2]["slot"] == "slot 2" and len(results[0]) == 3
    assert results[1] == results[2] == {rank: {"host": "a"} for rank in range(3)}
    assert remarks({0: FACTS, 1: {**FACTS, "device": "other"}}) == ["device differs: rank 0 cpu; rank 1 other"]


def test_what_is_asked_and_answered_does_not_grow_with_the_ranks():
    store, ranks, results = CountingStore(), 64, {}

    def one_rank(rank):
        results[rank] = roll_call(
            store, rank, ranks, {**FACTS, "host": f"node{rank // 32}", "slot": str(rank)}, limit_s=20
        )

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in reversed(range(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[5][63] == {"host": "node1"} and len(results) == ranks
    assert sorted(store.requests.values())[-2] <= 5  # of all ranks but the first
    assert store.longest < 300  # the facts of one rank, or the answer


def test_two_processes_with_one_rank_are_a_rank_that_is_missing():
    store, errors = dist.HashStore(), []

    def process(rank):
        with pytest.raises(LaunchError) as caught:
            roll_call(store, rank, 3, {**FACTS, "slot": "a"}, limit_s=0.5)
        errors.append(caught.value.slugs)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == [("ranks-missing",)] * 3


def test_the_head_node_does_not_wait_for_all_ranks_before_the_roll_call():
    """Torch's rendezvous waits for them in the constructor of its store, and names nobody."""
    place = {"world_size": 2, "hosts": ("first", "second"), "head": "127.0.0.1", "port": free_port()}
    head = Launcher("srun", "", rank=0, **place)
    with pytest.raises(LaunchError, match="ranks 1 on second have not answered"):
        roll_call(rank_store(head, 20.0, 20.0), 0, 2, FACTS, host_of=head.host_of, limit_s=0.2)
    with pytest.raises(LaunchError, match="head-silent"):
        rank_store(Launcher("srun", "", rank=1, **{**place, "port": free_port()}), 0.3, 1.0)


def test_a_missing_rank_is_named_with_its_host():
    results = call({}, absent=(1,))
    for rank in (0, 2):
        assert results[rank].slugs == ("ranks-missing",)
        assert "ranks 1 on node1 have not answered" in str(results[rank])


@pytest.mark.parametrize("fact", ["torch", "code", "run", "ranks"])
def test_differences_are_named_by_rank(fact):
    results = call({2: {fact: "other"}})
    for error in results.values():
        assert error.slugs == ("ranks-differ",) and "rank 2" in str(error) and "other" in str(error)
        assert "ranks 0, 1" in str(error)


def test_two_ranks_on_one_gpu_and_a_silent_head_have_names():
    assert call({1: {"slot": "cuda:0"}, 2: {"slot": "cuda:0"}})[0].slugs == ("device-shared",)
    assert call({}, absent=(0,), limit_s=-4.8)[1].slugs == ("head-silent",)


def test_facts_are_of_files_and_versions(tmp_path):
    from parallelize.launch.config.run_config_file import parse_run_config

    plan = tmp_path / "plan.yaml"
    plan.write_text("schema_version: 1\ntensor_parallel: {a: colwise}\n")
    config = parse_run_config(f"model: llama\nplan: {plan}\ndata: {{function: 'tests.launch.some_rows:rows'}}")
    before = facts_of_rank(config, "cpu")
    plan.write_text("schema_version: 1\ntensor_parallel: {a: rowwise}\n")
    after = facts_of_rank(config, "cpu")
    assert {name for name in before if before[name] != after[name]} == {"model code"}
