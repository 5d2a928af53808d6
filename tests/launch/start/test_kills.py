"""Ranks and launchers that are killed at any moment: the run finishes by itself, with the losses of the uninterrupted
one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time

import pytest

from tests.launch.launched import (
    LLAMA,
    all_losses,
    finish,
    losses,
    output_of,
    processes_of,
    ranks_of,
    run,
    started,
    wait_until,
    write_run,
)

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("launched")]
EVERY = 3


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check_lost_work(path) -> None:
    """Every attempt began at most a save interval before the last step that was done."""
    done = 0
    for resumed, logged in re.findall(r"^resumed at step (\d+)|^step +(\d+) ", output_of(path), re.M):
        if resumed:
            assert done - int(resumed) <= EVERY, (done, resumed)
        else:
            done = max(done, int(logged) + 1)


def reference_losses(tmp_path_factory, **values):
    folder = tmp_path_factory.mktemp("reference")
    path = write_run(folder, **values)
    assert run(path) == 0, output_of(path)
    return losses(path)


@pytest.mark.sweep
def test_a_killed_rank_is_started_again_and_repeats_its_steps(tmp_path):
    model = {"name": "own_models:fails", "set": {"call": 5, "marker": str(tmp_path / "killed")}}
    path = write_run(tmp_path, steps=7, model=model)
    assert run(path, "--restarts", "1") == 0, output_of(path)
    assert "rank 1 was ended by signal 9; starting 2 ranks again from step 3" in output_of(path)
    logged = all_losses(path)
    assert sorted(logged) == list(range(7)) and all(len(values) == 1 for values in logged.values())
    assert not processes_of(tmp_path)


@pytest.mark.sweep
def test_a_rank_that_fails_twice_is_left_out_and_the_losses_stay(tmp_path, tmp_path_factory):
    reference = reference_losses(tmp_path_factory, steps=9)
    path = write_run(tmp_path, steps=9, model={"name": "own_models:fails"})
    assert run(path, "--restarts", "3") == 0, output_of(path)
    assert "going on with 1 of 2 ranks" in output_of(path)
    continued = losses(path)
    assert continued.keys() == reference.keys()
    assert all(abs(continued[step] - reference[step]) < 1e-6 * reference[step] for step in reference)


@pytest.mark.sweep
def test_without_restarts_left_the_run_fails_and_names_the_rank(tmp_path):
    path = write_run(tmp_path, model={"name": "own_models:fails"})
    assert run(path) == 1
    assert "rank 1 was ended by signal 9" in output_of(path) and not processes_of(tmp_path)


MESHES = {"dp=2,tp=2": {"zero": 2}, "pp=2,dp=2": {}, "pp=2,dp=2,tp=2": {"zero": 1}, "dp=4,tp=2": {"zero": 3}}


def kill_at_random(process, path, moment: str, source: random.Random) -> None:
    """Kill a rank at some moment after another checkpoint; a rank that is killed twice before one would be left out."""
    latest = path.parent / "checkpoints" / "latest"
    before = latest.read_text() if latest.exists() else ""
    wait_until(lambda: (latest.exists() and latest.read_text() != before) or process.poll() is not None)
    if moment == "saving":
        folder = path.parent / "checkpoints"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: any(".writing" in name for name in os.listdir(folder)), 5, 0.0005)
    else:
        time.sleep(source.uniform(0, 0.6))
    ranks = ranks_of(process, path.parent)
    if ranks and moment != "launcher":
        kill(source.choice(ranks))


@pytest.mark.sweep
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(mesh, tmp_path, tmp_path_factory):
    values = {"model": LLAMA, "mesh": mesh, "options": MESHES[mesh], "steps": 60}
    values["checkpoints"] = {"folder": "checkpoints", "every": EVERY, "asynchronous": False, "keep_last": 3}
    reference = reference_losses(tmp_path_factory, **values)
    source, path = random.Random(mesh), write_run(tmp_path, **values)
    moments = ["random", "saving", "random", "saving", "launcher", "random"]
    kills, process = 0, None
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(started(path, "--restarts", "20"))
        for moment in moments:
            kill_at_random(process, path, moment, source)
            if process.poll() is not None:
                break
            kills += 1
            if moment == "launcher":
                kill(process.pid)
                process.wait(10)
                wait_until(lambda: not processes_of(tmp_path), 5)  # no orphan
                process = stack.enter_context(started(path, "--restarts", "20"))
        assert finish(process, path, 240) == 0, output_of(path)[-4000:]
    assert kills >= 5
    assert not processes_of(tmp_path)
    check_lost_work(path)
    assert "going on with" not in output_of(path)
    assert losses(path) == reference
    assert all(len(values) == 1 for values in all_losses(path).values())  # bit-equal, of every attempt
