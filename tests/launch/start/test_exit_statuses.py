"""What exit statuses of ranks say, who ends with a launcher, and which errors another attempt would meet again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from traceback import format_exception_only

import pytest
import torch.distributed as dist

from parallelize.base.errors import (
    CheckpointError,
    DataError,
    GradientError,
    HandshakeError,
    LaunchError,
    ParallelizeError,
    PipelineError,
    Problem,
    ShapeError,
)
from parallelize.checkpoint.format.folders import Lock
from parallelize.launch.config.run_config import AnomalySection
from parallelize.launch.environment.launcher import Launcher
from parallelize.launch.loop.anomalies import AnomalyWatch
from parallelize.launch.preflight.roll_call import rank_store, roll_call
from parallelize.launch.run_rank import _status_of
from parallelize.launch.start.supervisor import FAILED, PEER_LOST, children, judge
from tests.launch.launched import finish, output_of, run, started, wait_until, write_run
from tests.support.processes import free_port


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
    assert status(ParallelizeError, "missing-extra") == 3 == _status_of(ImportError("no module of the user's"))
    assert status(CheckpointError, "not-a-folder") == 2 == status(DataError, "bad-row")
    text = "".join(format_exception_only(ShapeError(Problem("id-out-of-range", "ids"))))
    for what, ended in ((text, 2), ("ValueError: x", FAILED)):
        assert _status_of(PipelineError(Problem("stage-failed", "x", rows=(("error", what),)))) == ended
    assert AnomalyWatch(AnomalySection()).judge(3, float("nan"), 1.0).action == "stop"


def test_a_peer_that_is_killed_while_ranks_start_is_tried_again():
    """Ranks without an agent end each by itself; a scheduler starts them again unless one says that it was a
    mistake."""
    head = Launcher("srun", "", rank=1, world_size=2, head="127.0.0.1", port=free_port())
    with pytest.raises(LaunchError, match="head-silent") as no_head:
        rank_store(head, 0.1, 1.0)
    with pytest.raises(LaunchError, match="ranks-missing") as no_rank:
        roll_call(dist.HashStore(), 0, 2, {"host": "a"}, limit_s=0.1)
    silent = [HandshakeError(Problem(slug, "rank 1 did not come")) for slug in ("ranks-missing", "rank-failed")]
    silent += [LaunchError(Problem("link-silent", "ranks 0 and 1"))]
    for error in (no_head.value, no_rank.value, *silent):
        assert _status_of(error) == PEER_LOST, error
    survivors = {rank: _status_of(no_rank.value) for rank in (0, 2)}
    assert judge(survivors).again and judge(survivors | {1: -9}).blamed == 1
    mistake = LaunchError(*no_rank.value.problems, Problem("ranks-differ", "ranks have different values of code"))
    assert _status_of(mistake) == 2 == _status_of(LaunchError(Problem("ranks-differ", "x")))


CHILD = (
    "import time; from parallelize.launch.start.end_with_parent import end_with_parent as e; e(); print('on', "
    "flush=True); time.sleep(60)"
)
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


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_the_first_step_asks_for_another_start(number, tmp_path):
    """A rank under a launcher other than ours, which waits for a rank that never comes."""
    path = write_run(tmp_path)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(path, **ranks) as process:
        wait_until(lambda: "2 ranks" in output_of(path))
        process.send_signal(number)
        assert finish(process, path, 10) == 75
    assert f"{signal.Signals(number).name}: stopped before the first step; nothing is lost" in output_of(path)


def test_a_folder_of_checkpoints_that_is_a_file_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(CheckpointError, match="not-a-folder") as raised:
            Lock(root)
        assert _status_of(raised.value) == 2


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.xdist_group("launched")
def test_rows_of_a_wrong_type_are_not_tried_again(tmp_path):
    (tmp_path / "own_rows.py").write_text("def rows():\n    return list(range(64))\n")
    path = write_run(tmp_path, data={"function": "own_rows:rows", "global_batch": 8})
    assert run(path, "--restarts", "3") == 2, output_of(path)
    assert output_of(path).count("bad-row: row 0 of a batch is a int") == 1, output_of(path)
    assert re.search(r"run.yaml:\d+:3: bad-row", output_of(path)) and "again" not in output_of(path)
