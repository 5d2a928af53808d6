"""A TrainJob of Kubeflow Trainer v2 as text, and the pods of Kubernetes that it has in common with a PyTorchJob. Torch-free."""

from __future__ import annotations

from typing import Any

import yaml

from parallelize.launch.emit.job import Job

RETRYABLE = 138
"""A status that makes a pod again: the training operator takes 128 or more for that, and no signal of the kubelet gives this one."""
_API = "trainer.kubeflow.org/v1alpha1"
_CONTAINER = "node"  # the names that Trainer looks for: of the replicated job, and of its container
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def train_job_manifest(job: Job) -> str:
    """A TrainJob, and the TrainingRuntime that it names: each pod is a node, and starts its ranks. `kubectl apply -f FILE`.

    Restarts after failures are of the command. A pod that a signal has stopped, or that was moved from its node, is made again without
    counting; any other failure ends the job. The pod's template stands in the runtime, because the fields by which a TrainJob
    changes one differ between 2.0 (`podTemplateOverrides`) and 2.2 (`runtimePatches`).

    Source: `trainjob_types.go`, `trainingruntime_types.go` of kubeflow/trainer 2.2; `podFailurePolicy` of Kubernetes' batch/v1.
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
