"""A blocking collective is asynchronous for the backend while two computations take turns, or nothing would run beside
it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from parallelize.comm import blocking, turns


class NotingGroup:
    """Notes whether a call is asynchronous."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []

    def _noted(self, *args: Any) -> None:
        self.asynchronous.append(args[-1].asyncOp)

    allreduce = _allgather_base = all_gather_single = _reduce_scatter_base = reduce_scatter_single = _noted


def calls(group: Any) -> None:
    x, out = torch.ones(2), torch.ones(4)
    blocking.all_reduce(x, group)
    blocking.all_gather(out, x, group)
    blocking.reduce_scatter(x, out, group)


def test_alone():
    calls(group := NotingGroup())
    assert group.asynchronous == [False] * 3


def test_in_turns():
    first, second = NotingGroup(), NotingGroup()
    with ThreadPoolExecutor(1) as worker:
        turns.run_in_turns(lambda: calls(first), lambda: calls(second), worker)
    assert first.asynchronous == second.asynchronous == [True] * 3
    calls(group := NotingGroup())
    assert group.asynchronous == [False] * 3


def test_beside_a_pair_in_other_threads(monkeypatch):
    monkeypatch.setattr(turns, "running", 1)
    calls(group := NotingGroup())
    assert group.asynchronous == [False] * 3
