"""On the processes that torchrun has started, or in the group that a program has made: as often as one likes."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize import _torch_private as private
from parallelize.errors import MeshError, Problem
from parallelize.groups import destroy_groups
from parallelize.verification.case import Request
from parallelize.verification.start import Outcomes, Told, on_this_rank

_RUNS = itertools.count()  # alike on every rank, as all of them call `verify` alike
_MEETING: list[Any] = []  # the one store of this process, behind torchrun's address
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    world = os.environ.get("WORLD_SIZE", "1")
    return world.isdigit() and int(world) > 1


def on_given_processes(request: Request, tell: Told) -> Outcomes:
    """On GPUs where there is one for each. A group that is there is used and left as it is."""
    number = next(_RUNS)
    _check_world(request)
    device = _device()
    if dist.is_initialized():
        default: Any = private.default_store()
        return _in_the_group(request, device, dist.PrefixStore(f"verify/{number}", default), tell)
    store = dist.PrefixStore(f"verify/{number}", _meeting(request))
    dist.init_process_group(
        "nccl" if device != "cpu" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=request.timeout_s),
    )
    try:
        return on_this_rank(request, device, dist.PrefixStore("answers", store), tell)
    finally:
        destroy_groups()


def _in_the_group(request: Request, device: str, store: Any, tell: Told) -> Outcomes:
    """Only the groups that are made meanwhile end with it."""
    if "cpu" not in device and dist.get_backend() == "gloo":
        device = "cpu"
    kept = set(map(id, private.known_groups()))
    try:
        return on_this_rank(request, device, store, tell)
    finally:
        for group in private.known_groups():
            if id(group) not in kept:
                dist.destroy_process_group(group)


def _check_world(request: Request) -> None:
    """Raises: MeshError `no-torchrun`, `wrong-world-size`."""
    missing = [name for name in _NEEDED if name not in os.environ]
    size = request.mesh.world_size
    if not dist.is_initialized() and missing:
        what = f"no processes run: {', '.join(missing)} is not set"
        fix = f"torchrun --nproc-per-node {size} ..., or backend `threads` or `gloo`, which need none"
        raise MeshError(Problem("no-torchrun", what, fix=fix))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if world != size:
        what = f"{request.mesh} makes {size} ranks, and {world} processes run"
        fix = f"torchrun --nproc-per-node {size}, or change a size"
        raise MeshError(Problem("wrong-world-size", what, fix=fix))


def _device() -> str:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
        return "cpu"
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def _meeting(request: Request) -> Any:
    """The store where the ranks find each other; made once, as a second one could not listen at the same port."""
    if not _MEETING:
        found = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=max(request.timeout_s, 60)))))
        _MEETING.append(found[0])
    return _MEETING[0]
