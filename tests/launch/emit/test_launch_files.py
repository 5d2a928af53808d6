"""Launch files are what their programs read: parsed here, and their numbers are those of the mesh and the save."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml

from parallelize.base.errors import LaunchError
from parallelize.base.terminal.console import ENVIRONMENT, MISTAKE, REQUEUE
from parallelize.cli.parser import build_parser
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.emit.launch_files import EMITTERS, job_of, save_time_file
from parallelize.launch.start.supervisor import FAILED, PEER_LOST

pytestmark = pytest.mark.torch_free


def config_of(tmp_path, mesh="pp=2,dp=4,tp=4", device="cuda"):
    text = (
        f"model: llama\ndata: {{function: 'tests.launch.some_rows:rows', global_batch: 64}}\nmesh: {mesh}\ndevice: "
        f"{device}\n"
    )
    return parse_run_config(text + f"checkpoints: {{folder: {tmp_path}}}", "runs/my run.yaml")


def emitted(tmp_path, kind, **more):
    return EMITTERS[kind](job_of(config_of(tmp_path, **more), ["steps=10"], 8, 3))


def save_took(config, seconds):
    path = save_time_file(config)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"save_s": seconds}))


def checked_by_bash(text):
    if shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


@pytest.mark.processes
def test_slurm(tmp_path):
    save_took(config_of(tmp_path), 100.0)
    text = emitted(tmp_path, "slurm")
    checked_by_bash(text)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("4", "8", "8")
    assert options["distribution"] == "block:block" and options["signal"] == "USR1@230" and "requeue" in options
    srun = shlex.split(next(line for line in text.splitlines() if line.strip().startswith("srun")))
    assert srun[-6:] == ["parallelize", "run", "runs/my run.yaml", "steps=10", "--restarts", "3"]
    assert "--mem-bind=local" in srun and '"$status" -eq 75' in text
    assert "# node 3: ranks 24-31 (pp=1 dp=2 tp=0 to pp=1 dp=3 tp=3)" in text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("statuses", "starts", "requeued", "end"),
    [
        ("1 70 0", 3, False, 0),
        (f"{PEER_LOST} 0", 2, False, 0),
        ("1 1 1 1 1", 4, False, 1),
        ("2", 1, False, 2),
        ("137 75", 2, True, 75),
        ("143", 1, False, 143),
    ],
)
def test_slurm_starts_the_ranks_again_as_often_as_restarts_say(tmp_path, statuses, starts, requeued, end):
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\necho >> {tmp_path}/starts\nset -- {statuses}\nshift $(($(wc -l < {tmp_path}/starts) - "
        "1))\nexit $1\n"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\ntouch {tmp_path}/requeued\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    ended = subprocess.run(
        ["bash"], input=emitted(tmp_path, "slurm"), text=True, env=environment, check=False, timeout=20
    )
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert ((tmp_path / "requeued").exists(), ended.returncode) == (requeued, end)


@pytest.mark.processes
def test_torchrun(tmp_path):
    text = emitted(tmp_path, "torchrun")
    checked_by_bash(text)
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("exec torchrun")))
    assert {"--nnodes=1:4", "--nproc-per-node=8", "--numa-binding=node", "--rdzv-backend=c10d"} <= set(command)
    assert command[command.index("-m") + 1 :] == [
        "parallelize",
        "run",
        "runs/my run.yaml",
        "steps=10",
        "--restarts",
        "3",
    ]
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args([part.replace("$NODE", "0") for part in command[2:]])
    assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("1:4", "8", 3)
    assert "--standalone" in emitted(tmp_path, "torchrun", mesh="dp=2", device="cpu")


def test_kubernetes(tmp_path):
    manifest = yaml.safe_load(emitted(tmp_path, "k8s"))
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert manifest["kind"] == "PyTorchJob" and manifest["metadata"]["name"] == "my-run"
    assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] == 4
    pod = replicas["Worker"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60 and manifest["spec"]["nprocPerNode"] == "8"
    assert pod["containers"][0]["command"][:3] == ["parallelize", "run", "runs/my run.yaml"]
    # the operator retries 128 and more alone, and counts nothing where there is no limit
    for replica in replicas.values():
        command = replica["template"]["spec"]["containers"][0]["command"]
        assert replica["restartPolicy"] == "ExitCode" and "backoffLimit" not in manifest["spec"]["runPolicy"]
        options = build_parser().parse_args(command[1:])
        assert options.requeue_status >= 128 and options.restarts == 3
        assert not {FAILED, MISTAKE, ENVIRONMENT, options.requeue_status} & {REQUEUE, *range(128, 138), 139, 143}
    assert "Worker" not in yaml.safe_load(emitted(tmp_path, "k8s", mesh="dp=2"))["spec"]["pytorchReplicaSpecs"]


def test_train_job(tmp_path):
    """Names and fields are those of kubeflow/trainer 2.2, and of Kubernetes' Job."""
    runtime, job = yaml.safe_load_all(emitted(tmp_path, "trainjob"))
    assert [document["apiVersion"] for document in (runtime, job)] == ["trainer.kubeflow.org/v1alpha1"] * 2
    assert job["kind"] == "TrainJob" and job["spec"]["runtimeRef"] == {"name": "my-run", "kind": "TrainingRuntime"}
    assert (runtime["kind"], runtime["metadata"]["name"]) == ("TrainingRuntime", "my-run")
    assert job["spec"]["trainer"] == {"numNodes": 4, "numProcPerNode": 8}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4, "torch": {}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    batch = replicated["template"]["spec"]
    pod = batch["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node" and container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["terminationGracePeriodSeconds"] == 60
    options = build_parser().parse_args(container["command"][1:])
    assert options.restarts == 3
    # a Job reads exit codes only where the kubelet starts nothing again; the first rule that matches applies
    assert pod["restartPolicy"] == "Never" and batch["backoffLimit"] == 0
    rules = batch["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    for rule, operator in zip(rules[1:], ("In", "NotIn"), strict=True):
        codes = {"containerName": "node", "operator": operator, "values": [options.requeue_status]}
        assert rule["onExitCodes"] == codes
    config = config_of(tmp_path, mesh="dp=2", device="cpu")
    numbered = job_of(replace(config, source=f"{'7' * 99}.yaml"), [], 8, 0)
    runtime, _ = yaml.safe_load_all(EMITTERS["trainjob"](numbered))
    assert re.fullmatch("[a-z][-a-z0-9]{1,38}[a-z0-9]", runtime["metadata"]["name"])
    assert "resources" not in yaml.safe_dump(runtime)


@pytest.mark.processes
@pytest.mark.parametrize(("cpus", "each"), [("64", "8"), ("4", "1"), ("", "1")])
def test_tasks_of_slurm_have_the_cores_of_their_node(tmp_path, cpus, each):
    (tmp_path / "srun").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/arguments\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    environment |= {"SLURM_CPUS_ON_NODE": cpus} if cpus else {}
    text = emitted(tmp_path, "slurm")
    subprocess.run(["bash"], input=text, text=True, env=environment, check=True, timeout=20)
    assert f"--cpus-per-task={each} --cpu-bind=cores" in (tmp_path / "arguments").read_text()


def test_ray(tmp_path):
    tree = ast.parse(emitted(tmp_path, "ray"))
    values = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call) and "Call" not in ast.dump(node.value)
    }
    assert values["(NODES, RANKS_PER_NODE)"] == (4, 8) and values["BUNDLE"] == {"CPU": 8, "GPU": 8}
    assert values["COMMAND"][:3] == ["parallelize", "run", "runs/my run.yaml"]
    odd = 'data.args={pattern: "\\N", quotes: """}'  # what a text of Python would read as its own
    ast.parse(EMITTERS["ray"](job_of(config_of(tmp_path), [odd], 8, 0)))


def test_a_mesh_that_does_not_fit_nodes_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="crosses-nodes"):
        emitted(tmp_path, "slurm", mesh="dp=2,tp=16")
    with pytest.raises(LaunchError, match="no-mesh"):
        emitted(tmp_path, "slurm", mesh="auto")


@pytest.mark.parametrize(
    "text",
    ['{"save_s": 1e999}', '{"save_s": 1e300}', '{"save_s": -5}', '{"save_s": NaN}', "[" * 9999, "\0", "[]", "{}"],
)
def test_a_time_that_no_save_took_is_none(tmp_path, text):
    config = config_of(tmp_path)
    save_took(config, 1.0)
    save_time_file(config).write_text(text)
    job = job_of(config, [], 8, 0)
    assert (job.save_s, job.lead_s) == (0.0, 60)
    save_time_file(config).unlink()
    os.mkfifo(save_time_file(config))
    assert job_of(config, [], 8, 0).save_s == 0.0
