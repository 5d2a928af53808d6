"""Who started this process: nothing, torchrun, srun, Kubernetes or Ray. Read from the environment, which is passed.
Torch-free.

A process is either one rank, or it starts the ranks of its node (`starts_ranks`). Nothing is guessed: variables that
belong together and are missing are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import LaunchError, Problem

FIRST_PORT, PORTS = 20_000, 20_000
SUPERVISOR = "PARALLELIZE_SUPERVISOR"
"""The process id of a `parallelize run` that started this rank, which ends with it."""


@dataclass(frozen=True)
class Launcher:
    """How this process was started.

    Attributes:
        kind: alone, torchrun, srun, kubernetes or ray. by: the variables that say so.
        rank, local_rank, world_size, local_world_size: of this process, where it is a rank; else None.
        nodes, node_rank: of this node, where it starts ranks; hosts: their names, where they are known.
        head, port: where ranks find each other; "" where whoever starts them chooses.
    """

    kind: str
    by: str
    rank: int | None = None
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    ranks_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    head: str = ""
    port: int = 0

    @property
    def starts_ranks(self) -> bool:
        return self.rank is None

    def sentence(self, ranks: int) -> str:
        """The first line of a run."""
        where = f", head node {self.head}:{self.port}" if self.head else ""
        if self.starts_ranks:
            nodes = f" on node {self.node_rank} of {self.nodes}" if self.nodes > 1 else ""
            return f"{self.kind}: starts {ranks} ranks{nodes}{where} ({self.by})"
        return f"{self.kind}: {self.world_size} ranks, {self.local_world_size} on this node{where} ({self.by})"

    def host_of(self, rank: int) -> str:
        """The host of a rank, where the launcher has said so."""
        node = rank // max(self.local_world_size, 1)
        return self.hosts[node] if node < len(self.hosts) else ""


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process.

    Raises: LaunchError `bad-environment` for variables that are missing or are no numbers, `not-under-srun` in a batch
        script of several nodes without srun.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _srun(environ)
    is_ray = "RAY_JOB_ID" in environ or "RAY_RAYLET_PID" in environ
    if "PET_NNODES" in environ or ("KUBERNETES_SERVICE_HOST" in environ and "MASTER_ADDR" in environ):
        return _node(environ, "ray" if is_ray else "kubernetes")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _as_rank(environ, "ray" if is_ray else "torchrun", "RANK and WORLD_SIZE")
    if int(environ.get("SLURM_JOB_NUM_NODES", "1") or 1) > 1:
        what = (
            f"this is the batch script of job {environ.get('SLURM_JOB_ID')} on {environ['SLURM_JOB_NUM_NODES']} nodes"
        )
        fix = "srun parallelize run ...; `parallelize run --emit slurm` writes the script"
        raise LaunchError(Problem("not-under-srun", f"{what}, and srun did not start this process", fix=fix))
    return Launcher("alone", "no launcher's variables are set")


def _torchrun(environ: Mapping[str, str]) -> Launcher:
    by = f"run {environ['TORCHELASTIC_RUN_ID']} of torchrun"
    if SUPERVISOR in environ:
        by = "started by this command"
    return _as_rank(environ, "torchrun", by)


def _as_rank(environ: Mapping[str, str], kind: str, by: str) -> Launcher:
    """A process that is one rank by the variables of torch.distributed."""
    _need(environ, kind, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    world = _number(environ, "WORLD_SIZE")
    return Launcher(
        kind,
        by,
        rank=_number(environ, "RANK"),
        local_rank=_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0,
        world_size=world,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else 1,
        head=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
    )


def _srun(environ: Mapping[str, str]) -> Launcher:
    """A task of srun: one rank, or, with one task a node, what starts the ranks of the node."""
    _need(environ, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_LOCALID")
    hosts = tuple(expand_hosts(environ["SLURM_STEP_NODELIST"]))
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    job = _number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    step = environ["SLURM_STEP_ID"]
    place: dict[str, Any] = {
        "hosts": hosts,
        "head": hosts[0],
        "port": FIRST_PORT + (job * 7 + int(step if step.isdigit() else 0)) % PORTS,
    }
    by = f"job {job}, step {step}, {tasks} tasks on {len(hosts)} nodes"
    per_node = tasks // len(hosts)
    if tasks % len(hosts):
        what = f"{tasks} tasks do not divide over {len(hosts)} nodes"
        raise LaunchError(Problem("bad-environment", what, fix="srun --ntasks-per-node N"))
    if tasks == len(hosts) and (devices := _devices_of_task(environ)) != 1:
        return Launcher(
            "srun", by, nodes=len(hosts), node_rank=_number(environ, "SLURM_NODEID"), ranks_per_node=devices, **place
        )
    return Launcher(
        "srun",
        by,
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        world_size=tasks,
        local_world_size=per_node,
        **place,
    )


def _devices_of_task(environ: Mapping[str, str]) -> int | None:
    """How many GPUs a task of srun has; None where SLURM gave none by name."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdigit() else None


def _node(environ: Mapping[str, str], kind: str) -> Launcher:
    """A pod of a PyTorchJob or TrainJob, or a task of Ray: a rank where LOCAL_RANK is set, else what starts those of
    its node."""
    if "LOCAL_RANK" in environ:
        return _as_rank(environ, kind, "LOCAL_RANK is set")
    prefix = "PET_" if "PET_MASTER_ADDR" in environ else ""
    _need(environ, kind, f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT")
    nodes = environ.get("PET_NNODES", environ.get("WORLD_SIZE", ""))
    node_rank = environ.get("PET_NODE_RANK", environ.get("RANK", ""))
    if not nodes.isdigit() or not node_rank.isdigit():
        what = f"{kind} gave this node the number {node_rank!r} of {nodes!r}"
        raise LaunchError(
            Problem("bad-environment", what, fix="PET_NODE_RANK and PET_NNODES, or RANK and WORLD_SIZE, as numbers")
        )
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    return Launcher(
        kind,
        f"{'task' if kind == 'ray' else 'pod'} {node_rank} of {nodes}",
        nodes=int(nodes),
        node_rank=int(node_rank),
        ranks_per_node=int(per_node) if per_node.isdigit() else None,
        head=environ[f"{prefix}MASTER_ADDR"],
        port=_number(environ, f"{prefix}MASTER_PORT"),
    )


def _need(environ: Mapping[str, str], kind: str, *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        fix = "start the run again; `parallelize run --emit` writes launch files"
        raise LaunchError(Problem("bad-environment", f"{kind} set no {', '.join(missing)}", fix=fix))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise LaunchError(
            Problem("bad-environment", f"{name} is {text!r}, which is no number", fix=f"unset {name}, or correct it")
        )
    return int(text)


# -- host lists ------------------------------------------------------------------------------------------------------
# Lists of hosts as SLURM writes them: `node[01-03,7],gpu5`. Torch-free.


_BRACKET = re.compile(r"([^\[\],]*)\[([^\]]*)\](.*)")
MOST = 100_000


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises: LaunchError `bad-host-list`."""
    hosts: list[str] = []
    for part in _parts(text):
        for host in _expand(part, text):
            hosts.append(host)
            if len(hosts) > MOST:
                raise _wrong(text, f"more than {MOST} hosts")
    if not hosts:
        raise _wrong(text, "no host")
    return hosts


def _parts(text: str) -> Iterator[str]:
    """Parts between the commas that are not in brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _wrong(text, "a bracket that does not belong")
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _wrong(text, "an open bracket")
    if text[start:]:
        yield text[start:]


def _expand(part: str, text: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(part)
    if match is None and part:
        yield part
        return
    if match is None:
        return
    before, ranges, after = match.groups()
    for interval in ranges.split(","):
        first, dash, last = interval.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first) > 9 or len(last) > 9:
            raise _wrong(text, f"{interval!r} is no range of numbers")
        if int(last or first) - int(first) > MOST:
            raise _wrong(text, f"more than {MOST} hosts")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{rest}"


def _wrong(text: str, what: str) -> LaunchError:
    return LaunchError(Problem("bad-host-list", f"{what} in the list of hosts {text[:80]!r}", fix="write node[01-04]"))


# -- torch variables -------------------------------------------------------------------------------------------------
# The variables by which torch.distributed finds its ranks, from what the launcher said. Torch-free.


def set_torch_variables(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a process that is a rank."""
    values = {
        "RANK": launcher.rank,
        "WORLD_SIZE": launcher.world_size,
        "LOCAL_RANK": launcher.local_rank,
        "LOCAL_WORLD_SIZE": launcher.local_world_size,
        "MASTER_ADDR": launcher.head,
        "MASTER_PORT": launcher.port,
    }
    environ.update({name: str(value) for name, value in values.items()})
