"""`parallelize run` as a user starts it: alone, under torchrun, with signals, with a NaN, out of memory, and what it
refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallelize.cli import main
from parallelize.launch.environment.head_node import own_address
from tests.launch.launched import (
    LLAMA,
    ROOT,
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

processes = [pytest.mark.processes, pytest.mark.xdist_group("launched")]


def marked(function):
    for mark in processes:
        function = mark(function)
    return function


def emitted(path: Path, capsys, *arguments: str) -> str:
    os.chdir(path.parent)
    assert main(["run", path.name, *arguments]) == 0
    return capsys.readouterr().out


def test_launch_files_schemas_and_mistakes_need_no_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path)
    assert "srun --kill-on-bad-exit" in emitted(path, capsys, "--emit", "slurm", "--ranks-per-node", "2")
    os.chdir(tmp_path)
    assert main(["run", "run.yaml", "--emit", "k8s", "data.text=[/data/only-there.txt]"]) == 0
    printed = capsys.readouterr()
    assert "kind: PyTorchJob" in printed.out and "only-there.txt on this machine" not in printed.out
    assert "there is no file /data/only-there.txt on this machine" in printed.err
    assert main(["run", "run.yaml", "data.text=[/data/only-there.txt]"]) == 2
    assert "no-such-file" in capsys.readouterr().err
    assert json.loads(Path(emitted(path, capsys, "--schema").strip()).read_text())["type"] == "object"
    for arguments in (
        ["run"],
        ["run", "run.yaml", "--restarts", "-1"],
        ["run", "absent.yaml"],
        ["run", "run.yaml", "step=1"],
        ["run", "run.yaml", "--requeue-status", "256"],
    ):
        assert main(arguments) == 2
    assert re.findall(r"(?:^|: )(bad-option|no-such-run|unknown-key):", capsys.readouterr().err, re.M) == [
        "bad-option",
        "bad-option",
        "no-such-run",
        "unknown-key",
        "bad-option",
    ]


@pytest.mark.sweep
@marked
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(tmp_path):
    path = write_run(tmp_path, steps=100_000)
    with started(path, "--requeue-status", "138") as process:
        wait_until(lambda: len(losses(path)) > 4)
        os.kill(ranks_of(process, tmp_path)[-1], signal.SIGTERM)
        assert finish(process, path) == 138
    stopped = int(re.search(r"stopped after step (\d+), saved", output_of(path))[1])
    assert (tmp_path / "checkpoints" / "latest").exists() and max(losses(path)) == stopped - 1
    assert not processes_of(tmp_path)
    assert json.loads((tmp_path / "checkpoints/reports/save-time.json").read_text())["save_s"] > 0


@pytest.mark.sweep
@marked
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_the_launcher_stops_saved_and_a_second_run_resumes(tmp_path, name):
    path = write_run(tmp_path, steps=100_000)
    with started(path) as process:
        wait_until(lambda: len(losses(path)) > 4)
        process.send_signal(getattr(signal, name))
        assert finish(process, path) == 75
    stopped = int(re.search(r"stopped after step (\d+), saved", output_of(path))[1])
    assert run(path, f"steps={stopped + 2}") == 0
    assert f"resumed at step {stopped}" in output_of(path) and max(losses(path)) == stopped + 1


@pytest.mark.sweep
@marked
@pytest.mark.parametrize(
    ("action", "status"), [("stop", 2), ("skip", 0), ("rewind", 0)], ids=["stop", "skip", "rewind"]
)
def test_a_nan_is_named_by_module_and_rank(tmp_path, action, status):
    model = {"name": "own_models:poisoned", "set": {"call": 5}}
    path = write_run(tmp_path, steps=8, model=model, anomalies={"nonfinite": action})
    assert run(path) == status, output_of(path)
    assert f"the output of middle on rank 1 is the first that is not finite ({action})" in output_of(path)
    if action == "rewind":
        assert "gone back to step 3; the data go on after the batch of step 4" in output_of(path)
    if status == 0:
        assert max(losses(path)) == 7


@pytest.mark.sweep
@marked
def test_a_mixture_logs_how_evenly_tokens_are_spread(tmp_path):
    mixture = {"name": "mixtral", "set": {**LLAMA["set"], "num_local_experts": 4}}
    path = write_run(tmp_path, steps=2, model=mixture, options={"ep": 2})
    assert run(path) == 0, output_of(path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # 2 of 4 experts are chosen: at most twice the mean, and as much on one rank
        assert 1 <= line["expert_rank_imbalance"] <= line["expert_imbalance"] <= 2
    assert "expert_imbalance" in output_of(path)


@pytest.mark.sweep
@marked
def test_out_of_memory_leaves_a_report(tmp_path):
    path = write_run(tmp_path, model={"name": "own_models:huge"})
    assert run(path) == 1
    reports = sorted(file.name for file in (tmp_path / "checkpoints" / "reports").iterdir())
    # torchrun ends the other rank when the first has failed, which may be before that one runs out of memory
    assert reports and set(reports) <= {"out-of-memory-rank-0.txt", "out-of-memory-rank-1.txt"}
    assert "the largest tensors:" in (tmp_path / "checkpoints/reports" / reports[0]).read_text()


@pytest.mark.sweep
@marked
def test_the_same_command_runs_under_torchrun_and_as_tasks_of_srun(tmp_path):
    path = write_run(
        tmp_path, steps=3, model=LLAMA, mesh="tp=2", metrics={"html": "page.html", "jsonl": "metrics.jsonl"}
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "parallelize",
        "run",
        path.name,
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("torchrun: 2 ranks, 2 on this node"), done.stderr[-2000:]
    assert "predicted: peak" in done.stdout and "link: tp (2 ranks)" in done.stdout
    assert re.search(r"step +1  loss .*mfu .*memory_gib .*comm_tp_ms .*imbalance", done.stdout), done.stdout
    assert "A profiled step of rank 0" in (tmp_path / "page.html").read_text()
    task = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    task |= {"SLURM_STEP_NODELIST": "localhost"}
    tasks = [started(path, "steps=5", **task, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    with tasks[0] as first, tasks[1] as second:
        assert finish(first, path) == 0 and finish(second, path) == 0, output_of(path)
    assert "srun: 2 ranks, 2 on this node, head node localhost" in output_of(path) and "resumed at step 3" in output_of(
        path
    )


@pytest.mark.sweep
@marked
def test_a_dry_run_ends_after_the_preflight_and_another_mesh_resumes(tmp_path):
    path = write_run(tmp_path, steps=4)
    assert run(path, "--dry-run") == 0 and "dry run: the preflight is done" in output_of(path)
    assert not (tmp_path / "checkpoints").exists()
    assert run(path) == 0
    assert run(path, "steps=6", "--ranks", "1") == 0, output_of(path)
    assert "resumed at step 4" in output_of(path) and "1 ranks: mesh dp=1" in output_of(path)


@pytest.mark.sweep
@marked
def test_mistakes_are_printed_once_and_end_the_run(tmp_path):
    path = write_run(tmp_path, model={"name": "own_models:absent"}, optimizer={"name": "Adamw"})
    assert run(path, "--restarts", "2") == 2
    assert output_of(path).count("no-such-factory") == 1 == output_of(path).count("no-such-object")


@pytest.mark.sweep
@marked
def test_two_nodes_find_each_other_by_the_variables_of_a_pod(tmp_path):
    try:
        head = own_address("192.0.2.1", 1)  # a documentation address: the route alone is asked for
    except OSError:
        pytest.skip("no network but loopback")
    if head.startswith("127."):
        pytest.skip("no network but loopback")
    with socket.socket() as free:
        free.bind((head, 0))
        port = str(free.getsockname()[1])
    path = write_run(tmp_path, steps=2)
    pod = {"PET_NNODES": "2", "PET_MASTER_ADDR": head, "PET_MASTER_PORT": port, "PET_NPROC_PER_NODE": "1"}
    nodes = [started(path, **pod, PET_NODE_RANK=str(node)) for node in range(2)]
    with nodes[0] as first, nodes[1] as second:
        assert finish(first, path) == 0 and finish(second, path) == 0, output_of(path)
    assert f"kubernetes: starts 1 ranks on node 0 of 2, head node {head}:{port}" in output_of(path)
    assert sorted(losses(path)) == [0, 1]
