"""Launch files as text: a batch script of SLURM, a script for torchrun, a TrainJob and a PyTorchJob of Kubernetes, a
driver of Ray. Torch-free."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import CheckpointError, LaunchError, Problem
from parallelize.base.files.paths import read_small
from parallelize.base.files.strict_json import read_json
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.rank_map import RankMap, rank_map

# -- train job -------------------------------------------------------------------------------------------------------
# A TrainJob of Kubeflow Trainer v2 as text, and the pods of Kubernetes that it has in common with a PyTorchJob.
# Torch-free.


RETRYABLE = 138
"""A status that makes a pod again: the training operator takes 128 or more for that, and no signal of the kubelet gives
this one."""
_API = "trainer.kubeflow.org/v1alpha1"
_CONTAINER = "node"  # the names that Trainer looks for: of the replicated job, and of its container
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def train_job_manifest(job: Job) -> str:
    """A TrainJob, and the TrainingRuntime that it names: each pod is a node, and starts its ranks. `kubectl apply -f
    FILE`.

    Restarts after failures are of the command. A pod that a signal has stopped, or that was moved from its node, is
    made again without counting; any other failure ends the job. The pod's template stands in the runtime, because the
    fields by which a TrainJob changes one differ between 2.0 (`podTemplateOverrides`) and 2.2 (`runtimePatches`).

    Source: `trainjob_types.go`, `trainingruntime_types.go` of kubeflow/trainer 2.2; `podFailurePolicy` of Kubernetes'
        batch/v1.
    """
    name = (job.name if job.name[0].isalpha() else f"run-{job.name}")[:40].rstrip("-")
    runtime = {"apiVersion": _API, "kind": "TrainingRuntime", "metadata": {"name": name}, "spec": _runtime(job)}
    trainer: dict[str, Any] = {"numNodes": job.ranks.nodes, "numProcPerNode": job.ranks.ranks_per_node}
    spec = {"runtimeRef": {"name": name, "kind": "TrainingRuntime"}, "trainer": trainer}
    train_job = {"apiVersion": _API, "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}
    comments = [
        *job.remarks(),
        f"here that status is {RETRYABLE}: the pods are made again, and any other failure ends the job",
        "set image, and the claim that has the file of the run and the folder of checkpoints",
    ]
    texts = [yaml.safe_dump(document, sort_keys=False) for document in (runtime, train_job)]
    return "".join(f"# {line}\n" for line in comments) + "---\n".join(texts)


def _runtime(job: Job) -> dict[str, Any]:
    pod = {"restartPolicy": "Never", **pod_of(job, container_of(job, _CONTAINER))}
    policy = {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _exit_codes("In")},
            {"action": "FailJob", "onExitCodes": _exit_codes("NotIn")},
        ]
    }
    batch = {"backoffLimit": 0, "podFailurePolicy": policy, "template": {"spec": pod}}
    replicated = {"name": _CONTAINER, "template": {"metadata": {"labels": _STEP}, "spec": batch}}
    policies = {"numNodes": job.ranks.nodes, "torch": {}}
    return {"mlPolicy": policies, "template": {"spec": {"replicatedJobs": [replicated]}}}


def _exit_codes(operator: str) -> dict[str, Any]:
    return {"containerName": _CONTAINER, "operator": operator, "values": [RETRYABLE]}


# -- what both kinds of job have ----------------------------------------------------------------------------------


def container_of(job: Job, name: str) -> dict[str, Any]:
    """The container of a node."""
    container: dict[str, Any] = {
        "name": name,
        "image": "IMAGE",
        "workingDir": "/runs",
        "command": [*job.command, "--requeue-status", str(RETRYABLE)],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.ranks.ranks_per_node}}
    return container


def pod_of(job: Job, container: dict[str, Any]) -> dict[str, Any]:
    """The pod of a node: with time for a save after the signal."""
    return {
        "terminationGracePeriodSeconds": job.lead_s,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


# -- launch files ------------------------------------------------------------------------------------------


_PORT = 29_400
_SRUN = '--kill-on-bad-exit=1 --cpus-per-task="$cpus" --cpu-bind=cores --mem-bind=local'
_HEAD = "set -euo pipefail"


def slurm_script(job: Job) -> str:
    """For `sbatch`: one task a rank, in blocks, so that neighbors on the last axis share a node and a NUMA domain."""
    gpus = [f"#SBATCH --gpus-per-node={job.ranks.ranks_per_node}"] if job.gpus else []
    return _lines(
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.ranks.nodes}",
        f"#SBATCH --ntasks-per-node={job.ranks.ranks_per_node}",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --distribution=block:block",
        f"#SBATCH --signal=USR1@{job.lead_s}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        *(f"# {line}" for line in job.remarks()),
        "# set account, partition and time for your cluster: sbatch --account=... --partition=... --time=... FILE",
        "",
        "set -uo pipefail",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        "# the cores of a node among its ranks: without it, a task is bound to one",
        f"cpus=$((${{SLURM_CPUS_ON_NODE:-0}} / {job.ranks.ranks_per_node}))",
        'cpus="$((cpus > 0 ? cpus : 1))"',
        *_attempts(f"srun {_SRUN} {job.shell}", job.restarts),
        'if [ "$status" -eq 75 ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    )


def _attempts(srun: str, restarts: int) -> list[str]:
    """`srun` once, or again in the same allocation: its tasks are ranks, which have no launcher of their own to start
    them again."""
    if not restarts:
        return [srun, "status=$?"]
    return [
        f"for attempt in $(seq 0 {restarts}); do",
        f"  {srun}",
        "  status=$?",
        '  case "$status" in 0|2|3|75|130|138|143) break ;; esac  # done, a mistake, saved, a second signal',
        "done",
    ]


def torchrun_script(job: Job) -> str:
    """For each node: `HEAD=first-node NODE=0 bash FILE`."""
    arguments = ["-m", "parallelize", *job.command[1:]]
    numa = ["--numa-binding=node"] if job.gpus else []
    several = job.ranks.nodes > 1
    rendezvous = (
        [
            "--rdzv-backend=c10d",
            f'--rdzv-endpoint="$HEAD:${{PORT:-{_PORT}}}"',
            f"--rdzv-id={job.name}",
            '--node-rank="$NODE"',
        ]
        if several
        else ["--standalone"]
    )
    # a restart takes the nodes that are left
    nodes = f"1:{job.ranks.nodes}" if job.restarts and several else str(job.ranks.nodes)
    options = [f"--nnodes={nodes}", f"--nproc-per-node={job.ranks.ranks_per_node}", *rendezvous]
    options += [f"--max-restarts={job.restarts}", *numa]
    needs = [': "${HEAD:?the name of the first node}" "${NODE:?the number of this node, from 0}"'] if several else []
    return _lines(
        "#!/bin/bash",
        *(f"# {line}" for line in job.remarks()),
        "# torchrun ends ranks 30 s after a signal; this gives a save as long as it needs",
        _HEAD,
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.lead_s}",
        *needs,
        f"exec torchrun {' '.join(options)} {shlex.join(arguments)}",
    )


def kubernetes_manifest(job: Job) -> str:
    """A PyTorchJob, for clusters that still have the training operator: each pod is a node, and starts its ranks.
    `kubectl apply -f FILE`.

    Restarts after failures are of the command. The operator makes a pod again that a signal has stopped, or that was
    killed with its node, and no other: under `ExitCode` statuses from 128 on are retried and the rest end the job. It
    has no backoffLimit, which would count them.

    Source: `ReconcilePods` and `IsRetryableExitCode` of kubeflow/training-operator 1.9.
    """
    replicas = {"Master": _replica(job, 1)}
    if job.ranks.nodes > 1:
        replicas["Worker"] = _replica(job, job.ranks.nodes - 1)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.ranks.ranks_per_node),
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }
    comments = [
        *job.remarks(),
        f"here that status is {RETRYABLE}: under ExitCode the operator retries 128 and more, and ends the job at any "
        "other",
        "set image, and the claim that has the file of the run and the folder of checkpoints",
    ]
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(manifest, sort_keys=False)


def _replica(job: Job, count: int) -> dict[str, Any]:
    pod = pod_of(job, container_of(job, "pytorch"))  # the name that the training operator looks for
    return {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}


def ray_script(job: Job) -> str:
    """A driver: one task on each node, which starts the ranks of that node. `ray job submit -- python FILE`."""
    bundle = {"CPU": job.ranks.ranks_per_node, **({"GPU": job.ranks.ranks_per_node} if job.gpus else {})}
    comments = "\n".join(f"# {line}" for line in job.remarks())
    return f'''"""Starts `parallelize run` on the nodes of a Ray cluster."""

{comments}
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, RANKS_PER_NODE = {job.ranks.nodes}, {job.ranks.ranks_per_node}
COMMAND = {list(job.command)!r}
BUNDLE = {bundle!r}


@ray.remote(max_retries=0)
def address():
    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


@ray.remote(max_retries=0)
def run_node(number, head, port):
    variables = {{"PET_NNODES": NODES, "PET_NODE_RANK": number, "PET_NPROC_PER_NODE": RANKS_PER_NODE}}
    variables |= {{"PET_MASTER_ADDR": head, "PET_MASTER_PORT": port, "RAY_JOB_ID": ray.get_runtime_context().get_job_id()}}
    environment = {{**os.environ, **{{name: str(value) for name, value in variables.items()}}}}
    return subprocess.run(COMMAND, env=environment, check=False).returncode


ray.init()
group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on_node(number):
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {{"scheduling_strategy": strategy, "num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0)}}


head, port = ray.get(address.options(**on_node(0)).remote())
statuses = ray.get([run_node.options(**on_node(number)).remote(number, head, port) for number in range(NODES)])
sys.exit(next((status for status in statuses if status), 0))
'''  # noqa: E501


EMITTERS = {
    "slurm": slurm_script,
    "torchrun": torchrun_script,
    "trainjob": train_job_manifest,
    "k8s": kubernetes_manifest,
    "ray": ray_script,
}


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


# -- job -------------------------------------------------------------------------------------------------------------
# What every launch file needs: the command, the map of ranks, the time that a signal leaves for a save. Torch-free.


SAVE_TIME = "save-time.json"
LEAST_LEAD_S, STEPS_S = 60, 30
_MOST_SAVE_S = 24 * 3600.0


@dataclass(frozen=True)
class Job:
    """A run as a launch file starts it.

    Attributes:
        name: of letters, digits and dashes. command: what each task runs. ranks: of nodes.
        lead_s: seconds before the end at which the signal is sent; save_s: what a save took, 0 where it is not known.
        gpus: whether ranks compute on GPUs. restarts: after failures.
    """

    name: str
    command: tuple[str, ...]
    ranks: RankMap
    lead_s: int
    save_s: float
    gpus: bool
    restarts: int

    @property
    def shell(self) -> str:
        return shlex.join(self.command)

    def remarks(self) -> list[str]:
        """Lines for the comments of the file."""
        how = f"the last save took {self.save_s:.1f} s" if self.save_s else "no save was measured yet"
        return [
            f"mesh {self.ranks.mesh}: {self.ranks.mesh.world_size} ranks, {self.ranks.ranks_per_node} on each of "
            f"{self.ranks.nodes} nodes",
            *self.ranks.lines()[:16],
            f"signal {self.lead_s} s before the end: twice the save and {STEPS_S} s for a step ({how})",
            "exit status 75: stopped by a signal and saved; start it again",
        ]


def job_of(config: RunConfig, overrides: Sequence[str], ranks_per_node: int, restarts: int) -> Job:
    """The job of a run. Raises: LaunchError `no-mesh` without a mesh, and as `rank_map`."""
    if config.mesh is None:
        fix = "mesh: dp=2,tp=4; `parallelize fit` finds one"
        raise LaunchError(
            Problem("no-mesh", "a launch file needs a mesh, and the run has none", config.place("mesh"), fix=fix)
        )
    save_s = measured_save_s(config)
    restart = ("--restarts", str(restarts)) if restarts else ()
    return Job(
        name=re.sub(r"[^a-z0-9]+", "-", Path(config.source).stem.lower()).strip("-") or "run",
        command=("parallelize", "run", config.source, *overrides, *restart),
        ranks=rank_map(config.mesh, config.options.complete().expert_ranks, ranks_per_node),
        lead_s=max(LEAST_LEAD_S, config.grace_s, round(2 * save_s) + STEPS_S),
        save_s=save_s,
        gpus=config.device != "cpu",
        restarts=restarts,
    )


def save_time_file(config: RunConfig) -> Path:
    return Path(config.checkpoints.folder or ".") / "reports" / SAVE_TIME


def measured_save_s(config: RunConfig) -> float:
    """Seconds of the last save of this run; 0 where there was none, or a file that says something that no save took."""
    path = save_time_file(config)
    try:
        seconds = float(read_json(read_small(path.parent, path.name, 1 << 10), str(path))["save_s"])
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError):
        return 0.0
    return seconds if 0.0 <= seconds <= _MOST_SAVE_S else 0.0
