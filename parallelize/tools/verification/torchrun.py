"""Verification on the processes that torchrun has started, or in a group that the program has initialized."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import MeshError, Problem
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.comm.groups import destroy_groups
from parallelize.tools.verification.configuration import Request
from parallelize.tools.verification.runner import ProgressCallback, RunResult, on_this_rank

_RUNS = itertools.count()  # the same number on every rank, because all ranks call `verify` equally often
_STORE: list[Any] = []
"""The store at torchrun's address, once it is connected. It belongs to the process, as that address does: later runs must
find it, and it ends with the process."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    world = os.environ.get("WORLD_SIZE", "1")
    return world.isdigit() and int(world) > 1


def on_running_processes(request: Request, tell: ProgressCallback) -> RunResult:
    """Run this process's rank, on a GPU if there is one for each. An initialized group is used and not changed."""
    number = next(_RUNS)
    _check_world(request)
    device = _device()
    if dist.is_initialized():
        default: Any = private_groups.default_store()
        return _in_default_group(request, device, dist.PrefixStore(f"verify/{number}", default), tell)
    store = dist.PrefixStore(f"verify/{number}", _torchrun_store(request))
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


def _in_default_group(request: Request, device: str, store: Any, tell: ProgressCallback) -> RunResult:
    """Run in the existing default group. Only groups that are created during the run are destroyed."""
    if "cpu" not in device and dist.get_backend() == "gloo":
        device = "cpu"
    before = set(map(id, private_groups.known_groups()))
    try:
        return on_this_rank(request, device, store, tell)
    finally:
        for group in private_groups.known_groups():
            if id(group) not in before:
                dist.destroy_process_group(group)


def _check_world(request: Request) -> None:
    """Raises: MeshError `no-torchrun`, `wrong-world-size`."""
    missing = [name for name in _NEEDED if name not in os.environ]
    size = request.mesh.world_size
    if not dist.is_initialized() and missing:
        what = f"no processes run: {', '.join(missing)} is not set"
        fix = f"torchrun --nproc-per-node {size} ..., or backend `threads` or `gloo`, which need none"
        raise MeshError(Problem("no-torchrun", what, fix=fix))
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if world_size != size:
        what = f"{request.mesh} has {size} ranks, and {world_size} processes run"
        fix = f"torchrun --nproc-per-node {size}, or change a size"
        raise MeshError(Problem("wrong-world-size", what, fix=fix))


def _device() -> str:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local_rank:
        return "cpu"
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _torchrun_store(request: Request) -> Any:
    """The store of the rendezvous. It is created once, because a second one could not listen on the same port."""
    if not _STORE:
        timeout = timedelta(seconds=max(request.timeout_s, 60))
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
        _STORE.append(store)
    return _STORE[0]
