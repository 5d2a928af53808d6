"""`verify` on real processes: those that it starts, and those that torchrun has started."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parallelize import load_plan, verify
from parallelize.base.errors import HandshakeError, ModelError, PlanError
from parallelize.plan.styles.notation import parse_style
from tests.tools.verification.towers import RULES, tower

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("ranks")]
ROOT = Path(__file__).parents[3]

COMMAND = """
import sys
from parallelize.cli import main
sys.exit(main())
"""
TWICE = """
import json, os, sys
import torch
from parallelize import ParallelModel, verify
from tests.tools.verification.towers import RULES, tower

rank, stock = int(os.environ["RANK"]), ParallelModel.step
def wrong(self, *args, **kwargs):
    return stock(self, *args, **kwargs) * (1.5 if rank == 1 else 1)
results = []
if sys.argv[1] == "existing":
    torch.distributed.init_process_group("gloo")
for step in (stock, wrong, stock):
    ParallelModel.step = step
    results.append(verify(tower, RULES, "tp=2", backend="torchrun", timeout_s=30).ok)
assert torch.distributed.is_initialized() == (sys.argv[1] == "existing")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
open(f"{sys.argv[2]}.{rank}", "w").write(json.dumps(results))
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.sweep
def test_processes_of_its_own():
    result = verify("llama-3-8b", mesh="dp=2,tp=2", backend="gloo", zero=2, sequence_parallel=True, timeout_s=60)
    assert result.ok, f"\n{result}"
    assert result.backend == "gloo" and max(row.error for row in result.rows) < 1e-13


@pytest.mark.sweep
def test_a_difference_on_processes_is_named():
    plan = load_plan("llama")
    swapped = [replace(r, style=parse_style("colwise")) if "down_proj" in r.pattern else r for r in plan.rules]
    result = verify("llama", replace(plan, rules=tuple(swapped)), "tp=2", backend="gloo", timeout_s=60)
    assert result.difference is not None and result.difference.module == "model.layers.0.mlp.down_proj"
    with pytest.raises(PlanError, match="no-such-plan"):
        verify("gpt2", "gtp2", "tp=2", backend="gloo", timeout_s=60)


@pytest.mark.sweep
def test_under_torchrun(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(COMMAND)
    done = torchrun(str(script), "verify", "gpt2", "--mesh", "tp=2", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    data = json.loads(done.stdout)  # rank 0 alone prints
    assert data["ok"] and data["backend"] == "torchrun"
    done = torchrun(str(script), "verify", "gpt2", "--mesh", "tp=4", "--json")
    assert done.returncode and json.loads(done.stdout)["error"][0]["slug"] == "wrong-world-size"


@pytest.mark.sweep
@pytest.mark.parametrize("group", ["own", "existing"])
def test_several_verifications_of_one_job(tmp_path, group):
    """A correct step, one that is wrong on rank 1, a correct one again: no run reads the results of another."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    done = torchrun(str(script), group, str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"results.{rank}").read_text()) == [True, False, True]


def slow_in_children():
    """A factory that does not return in time in the processes that `verify` starts."""
    if multiprocessing.parent_process() is not None:
        time.sleep(3600)
    return tower()


def says_no():
    raise ValueError("the factory says no")


@pytest.mark.sweep
def test_one_deadline_for_processes():
    before = set(multiprocessing.active_children())  # ranks of a pool
    with pytest.raises(HandshakeError, match=r"ranks-timed-out: ranks \[0, 1, 2\] did not answer in 3 s"):
        verify(slow_in_children, RULES, "tp=3", backend="gloo", timeout_s=3)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.sweep
def test_a_users_error_is_reported_without_a_traceback():
    with pytest.raises(ModelError, match="the factory says no") as error:
        verify(says_no, RULES, "tp=2", backend="gloo", timeout_s=30)
    assert error.value.slugs == ("factory-failed",) and "Traceback" not in str(error.value)


@pytest.mark.sweep
def test_ctrl_c_ends_the_command_and_prints_nothing():
    command = [sys.executable, "-m", "parallelize", "verify", "gpt2", "--mesh", "tp=2", "--backend", "gloo", "--quiet"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    until = time.monotonic() + 60
    while len(children.read_text().split()) < 2 and time.monotonic() < until:
        time.sleep(0.05)  # until its processes have begun to load
    os.killpg(running.pid, signal.SIGINT)
    output = running.communicate(timeout=60)[1]
    assert running.returncode in (130, 0) and "Traceback" not in output, output
