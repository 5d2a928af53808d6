"""`verify` ends in time, and leaves the caller's process groups, generators and gradient mode as they were."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallelize import verify
from parallelize.base.errors import HandshakeError, MeshError
from parallelize.tools.verification import threads
from parallelize.tools.verification.threads import run_ranks, still_running
from tests.tools.verification.towers import RULES, Tower, on_a_rank, tower

HERE = "tests.tools.verification.test_the_caller_is_left_alone"


@pytest.fixture(autouse=True)
def _only_threads_of_this_test(monkeypatch):
    """Ranks that other tests could not stop may still sleep."""
    monkeypatch.setattr(threads, "_UNSTOPPABLE", [])


class Waits(Tower):
    may_go_on = threading.Event()

    def forward(self, x):
        if on_a_rank():
            self.may_go_on.wait(60)
        return super().forward(x)


class Loop(Tower):
    def forward(self, x):
        while on_a_rank():
            time.sleep(0.01)
        return super().forward(x)


@pytest.mark.sweep
def test_late_ranks_leave_the_callers_group_alone(tmp_path):
    with pytest.raises(HandshakeError, match="ranks-timed-out"):
        verify(lambda: tower(cls=Waits), RULES, "dp=2", timeout_s=0.5)
    assert still_running()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        Waits.may_go_on.set()
        for thread in threads._UNSTOPPABLE:
            thread.join(60)
        assert not still_running() and dist.is_initialized()
        assert verify(tower, RULES, "tp=2").ok and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_endless_ranks_are_stopped_and_named():
    with pytest.raises(HandshakeError, match=r"ranks-timed-out: ranks \[0, 1, 2, 3\] still run after 1 s"):
        verify(lambda: tower(cls=Loop), RULES, "tp=4", timeout_s=1)
    assert not still_running()
    assert verify(tower, RULES, "tp=2").ok


class Endless:
    """A thread that runs forever, on a clock that advances only while somebody waits for a thread."""

    now = 0.0

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float) -> None:
        Endless.now += timeout


@pytest.mark.parametrize("failures", [[], [(0, ValueError("on rank 0"))]], ids=["all run", "one has failed"])
def test_one_deadline_for_all_ranks(monkeypatch, failures):
    monkeypatch.setattr(Endless, "now", 0.0)
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: Endless.now))
    threads._wait_for_ranks([Endless() for _ in range(4)], 100.0, failures)
    assert Endless.now == pytest.approx(threads._GRACE_S if failures else 100.0)


def test_a_rank_that_fails_ends_the_run_with_its_own_error():
    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("mine")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="mine"):
        run_ranks(3, body)
    assert run_ranks(2, lambda rank: rank) == [0, 1]


class Sleeper(Tower):
    def forward(self, x):
        if on_a_rank():
            time.sleep(3600)
        return super().forward(x)


def sleeper():
    """The model of the command below."""
    return {**tower(cls=Sleeper), "inputs": tower()["inputs"]}


@pytest.mark.sweep
@pytest.mark.processes
def test_the_command_ends_cleanly_after_a_timeout(tmp_path):
    command = [sys.executable, "-m", "parallelize", "verify", f"{HERE}:sleeper", "--mesh", "dp=2", "--timeout", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"][0]["slug"] == "ranks-timed-out"


class Draws(Tower):
    def forward(self, x):
        random.random()
        return super().forward(x) + 0 * torch.rand(()).to(x)


def test_the_callers_generators_stay():
    kept, other = torch.get_rng_state(), random.getstate()
    assert verify(lambda: tower(cls=Draws), RULES, "tp=2").ok
    assert torch.equal(kept, torch.get_rng_state()) and random.getstate() == other


def test_gradients_are_on_whatever_the_caller_has_turned_off():
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert verify(tower, RULES, "tp=2").ok
            assert not torch.is_grad_enabled()


@pytest.mark.sweep
def test_a_group_that_exists_is_used_and_left(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for _ in range(2):
            assert verify(tower, RULES, "dp=1", backend="torchrun").ok
        assert dist.is_initialized()
        with pytest.raises(MeshError, match="wrong-world-size"):
            verify(tower, RULES, "tp=2", backend="torchrun")
    finally:
        dist.destroy_process_group()
