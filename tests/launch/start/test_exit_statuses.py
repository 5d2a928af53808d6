"""What exit statuses of ranks say, who ends with a launcher, and which errors another attempt would meet again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from parallelize.errors import CheckpointError, DataError, GradientError, PipelineError, Problem
from parallelize.launch.config.run_config import AnomalySection
from parallelize.launch.loop.anomalies import AnomalyWatch
from parallelize.launch.run_rank import _status_of
from parallelize.launch.start.exit_statuses import FAILED, PEER_LOST, judge
from parallelize.launch.start.forwarding import children
from tests.launch.launched import wait_until


@pytest.mark.parametrize(
    ("statuses", "status", "again", "blamed"),
    [
        ({}, 0, False, None),
        ({0: 75, 1: 75}, 75, False, 0),
        ({2: 2, 0: PEER_LOST}, 2, False, 2),
        ({1: 3}, 3, False, 1),
        ({0: PEER_LOST, 3: -9, 1: -15}, FAILED, True, 3),
        ({0: PEER_LOST, 2: FAILED}, FAILED, True, 2),
        ({1: PEER_LOST, 0: -15}, FAILED, True, 0),
    ],
)
def test_statuses_are_judged(statuses, status, again, blamed):
    ended = judge(statuses)
    assert (ended.status, ended.again, ended.blamed) == (status, again, blamed)


def test_errors_have_statuses():
    def status(cls, slug, what="x"):
        return _status_of(cls(Problem(slug, what)))

    assert status(DataError, "empty-data") == 2 == status(CheckpointError, "data-position")
    assert status(GradientError, "nonfinite-step") == 2 == status(GradientError, "loss-spike")
    assert status(CheckpointError, "rank-lost") == PEER_LOST == status(PipelineError, "peer-lost")
    assert status(CheckpointError, "write-failed") == FAILED == _status_of(ValueError("x"))
    assert _status_of(RuntimeError("Connection reset by peer")) == PEER_LOST
    assert AnomalyWatch(AnomalySection()).judge(3, float("nan"), 1.0).action == "stop"


CHILD = "import time; from parallelize.launch.start.end_with_parent import end_with_parent as e; e(); print('on', flush=True); time.sleep(60)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_rank_ends_with_a_launcher_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.pid in children()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        wait_until(lambda: not alive(child), 5)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
