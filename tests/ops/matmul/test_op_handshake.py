"""Ranks use one algorithm for a matmul: the first rank's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelize import build_mesh, calibrate
from parallelize.comm.groups import Group
from parallelize.ops.matmul import op_handshake
from tests.ops.matmul.handshake_in_turns_jobs import after_a_disagreement
from tests.support.threads import run_ranks


def test_calibration_of_one_rank():
    run_ranks(1, lambda rank: calibrate(build_mesh("cpu", tp=1)))


def test_the_first_ranks_choice_is_used_where_lines_go_through_the_store(monkeypatch):
    """As over NCCL: a line that is known is not sent again, and its algorithm stays that of the first rank."""
    monkeypatch.setattr(op_handshake, "_BY_STORE", ("threaded",))
    store = dist.HashStore()
    monkeypatch.setattr(op_handshake.private_groups, "default_store", lambda: store)

    def body(rank: int) -> list[str]:
        group, device = Group(dist.group.WORLD), torch.device("cpu")
        return [op_handshake.agree_on_first(group, device, "a line", ["chunked/4", "sync"][rank]) for _ in range(3)]

    assert run_ranks(2, body) == [["chunked/4"] * 3] * 2


@pytest.mark.processes
@pytest.mark.parametrize("reports", [False, True], ids=["differs", "fails"])
def test_computations_in_turns_agree_again_after_a_disagreement(two_processes, reports):
    first, second = two_processes.run(after_a_disagreement, reports)
    assert first == ["ok", "ranks-disagree", "ok", "ok"]
    assert second == ["ok", "reported" if reports else "ranks-disagree", "ok", "ok"]
