"""The roll call: who is missing is named, what differs is named by rank, the same on every rank."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from parallelize.errors import LaunchError
from parallelize.launch.preflight.rank_facts import facts_of_rank
from parallelize.launch.preflight.roll_call import remarks, roll_call

FACTS = {"host": "a", "device": "cpu", "threads": "1", "torch": "2.13", "python": "3.11", "parallelize": "0.1"}
FACTS |= {"code": "c", "model code": "m", "run": "r", "ranks": "3"}


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
    assert results[0] == results[1] == results[2] and results[0][2]["slot"] == "slot 2"
    assert remarks({0: FACTS, 1: {**FACTS, "device": "other"}}) == ["device differs: rank 0 cpu; rank 1 other"]


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
    plan.write_text("one")
    config = parse_run_config(f"model: llama\nplan: {plan}\ndata: {{function: 'a:b'}}")
    before = facts_of_rank(config, "cpu")
    plan.write_text("two")
    after = facts_of_rank(config, "cpu")
    assert {name for name in before if before[name] != after[name]} == {"model code"}
