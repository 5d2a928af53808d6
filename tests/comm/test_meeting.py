"""Many ranks meet at one store: threads, each with its own client."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from parallelize.base.errors import HandshakeError
from parallelize.comm import uncaught_errors
from parallelize.comm.meeting import Meeting

RANKS = 300  # more than are read at once


class Counting:
    """A store that counts requests."""

    def __init__(self, store: dist.Store):
        self.store, self.counts = store, {}

    def __getattr__(self, name: str):
        def call(*args):
            self.counts[name] = self.counts.get(name, 0) + 1
            return getattr(self.store, name)(*args)

        return call


def meet(facts_of, absent=(), timeout_s: float = 20.0, ranks: int = RANKS, store=None):
    """(rank -> slugs and rows of its error, requests of the first rank) of a meeting."""
    store = store or dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    errors, judge = {}, Counting(store)

    def body(rank: int) -> None:
        try:
            own = judge if rank == 0 else store
            Meeting(own, tuple(range(ranks)), rank, "a call").compare(facts_of(rank), timeout_s)
        except HandshakeError as error:
            errors[rank] = error

    present = [rank for rank in range(ranks) if rank not in absent]
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert set(errors) in (set(), set(present))  # all or none
    return errors, judge.counts


def test_facts_that_agree_are_not_read():
    errors, counts = meet(lambda rank: {"plan": "x" * 1000, "mesh": "dp=300"})
    assert not errors
    assert "get" not in counts and counts["multi_get"] == 2 and counts["set"] == 3


def test_ranks_that_differ_are_named_with_their_values():
    errors, counts = meet(lambda rank: {"plan": "a" if rank in (7, 270) else "b", "torch": "2.13"})
    text = str(errors[200])
    assert "ranks-disagree" in text and "7, 270" in text and "torch" not in text
    assert counts["get"] == 2  # of one rank for each of the two digests


def test_an_order_of_facts_is_no_difference():
    facts = {"a": "1", "b": "2"}
    errors, _ = meet(lambda rank: dict(sorted(facts.items(), reverse=rank % 2 == 0)), ranks=3)
    assert not errors


def test_absent_ranks_are_named_and_meet_the_next_time():
    store = dist.HashStore()
    errors, _ = meet(lambda rank: {"a": "1"}, absent=(3, 290), timeout_s=1.0, store=store)
    assert "ranks-missing" in str(errors[1]) and "3, 290" in str(errors[1])
    assert not meet(lambda rank: {"a": "1"}, store=store)[0]


def test_an_error_of_the_last_rank_is_told_at_once(monkeypatch):
    """Although ranks before it are late too."""
    store = dist.HashStore()
    monkeypatch.setattr(uncaught_errors.private_groups, "default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: RANKS - 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    uncaught_errors._publish("ValueError: boom")
    errors, _ = meet(lambda rank: {"a": "1"}, absent=(5, RANKS - 1), timeout_s=50.0, store=store)
    assert "rank-failed" in str(errors[0]) and "boom" in str(errors[0]) and f"rank {RANKS - 1}" in str(errors[0])


@pytest.mark.parametrize("kind", ["files", "tcp"])
def test_other_stores(kind, tmp_path):
    files = dist.FileStore(str(tmp_path / "store"), -1)
    store = files if kind == "files" else dist.TCPStore("127.0.0.1", 0, None, True)
    assert not meet(lambda rank: {"a": "1"}, ranks=4, store=store)[0]
    errors, _ = meet(lambda rank: {"a": str(rank // 2)}, ranks=4, store=store)
    assert "ranks 2, 3" in str(errors[3])
