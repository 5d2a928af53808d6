"""A blocking collective is asynchronous for the backend while two computations take turns, or nothing would run beside
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelize.comm import blocking, turns


class NotingGroup:
    """Notes whether a call is asynchronous."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []

    def _noted(self, *args: Any) -> None:
        self.asynchronous.append(args[-1].asyncOp)

    allreduce = _allgather_base = all_gather_single = _reduce_scatter_base = reduce_scatter_single = _noted


@pytest.mark.parametrize("in_turns", [False, True])
def test_calls(in_turns, monkeypatch):
    monkeypatch.setattr(turns, "takes_turns", lambda: in_turns)
    group: Any = NotingGroup()
    x, out = torch.ones(2), torch.ones(4)
    blocking.all_reduce(x, group)
    blocking.all_gather(out, x, group)
    blocking.reduce_scatter(x, out, group)
    assert group.asynchronous == [in_turns] * 3
