"""The processes that were started for a mesh: counted before any of them waits for another one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from parallelize.base.errors import MeshError, Problem
from parallelize.base.mesh import MeshSpec

_NUMBERS, _ADDRESS = ("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")


def join_processes(spec: MeshSpec) -> None:
    """Check that as many processes run as the mesh has ranks. One that no launcher has started becomes a group of one here, for a
    mesh of one; else PyTorch makes the group from the variables of the launcher, which are complete.

    Raises: MeshError `bad-environment`, `wrong-world-size`; on every rank alike, before a rank waits for another one.
    """
    if dist.is_initialized():
        _check_count(spec, dist.get_world_size())
        return
    if not any(os.environ.get(name) for name in _NUMBERS):
        _check_count(spec, 1, "no launcher has set RANK and WORLD_SIZE")
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in (*_NUMBERS, *_ADDRESS) if not os.environ.get(name)]
    if missing:
        there = [name for name in (*_NUMBERS, *_ADDRESS) if name not in missing]
        what = f"{', '.join(there)} are set, but not {', '.join(missing)}, by which processes find each other"
        raise MeshError(Problem("bad-environment", what, fix=f"{_command(spec)}, which sets all of them"))
    text = os.environ["WORLD_SIZE"]
    if not text.isdigit():
        what = f"WORLD_SIZE is {text!r}, which is no number"
        raise MeshError(Problem("bad-environment", what, fix=f"{_command(spec)}, which sets it"))
    _check_count(spec, int(text), "WORLD_SIZE of the launcher")


def _check_count(spec: MeshSpec, processes: int, by: str = "") -> None:
    if processes != spec.world_size:
        ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
        running = "1 process runs" if processes == 1 else f"{processes} processes run"
        what = f"{spec} needs {ranks}, and {running}{f' ({by})' if by else ''}"
        fix = f"{_command(spec)}; or sizes that multiply to {processes}"
        raise MeshError(Problem("wrong-world-size", what, fix=fix))


def _command(spec: MeshSpec) -> str:
    """The line that starts as many processes as the mesh needs: on the nodes of this job where they can have equally many."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nodes = int(world) // max(int(local), 1) if local.isdigit() and world.isdigit() else 1
    if nodes < 2 or spec.world_size % nodes:
        nodes = 1
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "..."
    more = " ..." if sys.argv[1:] and script != "..." else ""
    on_nodes = f"--nnodes {nodes} " if nodes > 1 else ""
    return f"torchrun {on_nodes}--nproc-per-node {spec.world_size // nodes} {script}{more}"
