"""Where the ranks of a gloo group are on one host: memory that all of them map, found and agreed on by the ranks
themselves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_tensors import counts_collectives, uncounted
from parallelize.comm import shared_memory
from parallelize.comm.groups import Group
from parallelize.comm.shared_memory import SharedMemory

_FOLDER, _NAME_BYTES = "/dev/shm", 64
_MOST_RANKS = 16  # every rank reads what each other rank has written


@contextmanager
def through_shared_memory(group: Group, device_type: str) -> Iterator[None]:
    """A context in which sums and gathers of CPU tensors over `group` go through shared memory, if its ranks are on one
    host.

    Where they are not, or where this machine, its /dev/shm, a watch or `CommDebugMode` on any rank rules it out, they
    go through the process group as ever. Sums are taken in the order of ranks; of two ranks they have the bits of
    gloo's.

    Args:
        device_type: that of the tensors of the group's ranks.

    Cost: one all-reduce of 8 bytes, on the first call of a group also a broadcast of 64 bytes, a second all-reduce and
        512 KiB of memory for each rank.
    """
    memory = _agreed_memory(group) if _is_candidate(group, device_type) else None
    if memory is None:
        yield
        return
    SharedMemory.active[group.pg] = memory
    try:
        yield
    except BaseException:  # this rank may have left some other rank waiting: no later call may match that one
        group.state.shared_memory = None
        raise
    finally:
        del SharedMemory.active[group.pg]


def _is_candidate(group: Group, device_type: str) -> bool:
    """What is the same on all ranks of the group."""
    on_gloo = device_type == "cpu" and group.wire is None and group.backend(torch.device("cpu")) == "gloo"
    return on_gloo and 1 < group.size <= _MOST_RANKS and group.pg not in SharedMemory.active


def _agreed_memory(group: Group) -> SharedMemory | None:
    """The group's memory where every rank can use it now, else None on every rank."""
    possible = shared_memory.is_supported() and SharedMemory.is_allowed and not counts_collectives()
    state = group.state
    with uncounted():
        ready, all_possible = _least(
            group, state.shared_memory is not None, possible and not state.has_no_shared_memory
        )
        if not all_possible:
            return None
        if not ready:
            state.shared_memory = _made_by_all(group)
            state.has_no_shared_memory = state.shared_memory is None
    return state.shared_memory


def _least(group: Group, *values: bool) -> list[bool]:
    """Of each value, whether it is true on every rank."""
    message = torch.tensor(values, dtype=torch.int32)
    group.all_reduce(message, dist.ReduceOp.MIN)
    return [bool(value) for value in message.tolist()]


def _made_by_all(group: Group) -> SharedMemory | None:
    """A file that the first rank makes and every rank maps; None on every rank where one of them cannot.

    Its name is random, so a rank that can open it is on the same host. It is removed at once, and its memory lives as
    long as maps do.
    """
    name, descriptor = _new_file(group.size) if group.rank == 0 else ("", -1)
    message = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    message[: len(name)] = torch.tensor(list(name.encode()), dtype=torch.uint8)
    group.broadcast(message, 0)
    name = bytes(message.tolist()).rstrip(b"\0").decode()
    try:
        memory = _mapped(group, name, descriptor)
        is_mapped_by_all = all(_least(group, memory is not None))
    finally:
        if group.rank == 0 and name:
            with suppress(OSError):
                os.unlink(f"{_FOLDER}/{name}")
    return memory if is_mapped_by_all else None


def _new_file(size: int) -> tuple[str, int]:
    """(name, descriptor) of a file with memory of its own; ("", -1) where there is none."""
    name = f"parallelize-{secrets.token_hex(16)}"
    try:
        descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return "", -1
    try:
        # else a full /dev/shm would kill a later writer
        os.posix_fallocate(descriptor, 0, shared_memory.file_bytes(size))
    except OSError:
        os.close(descriptor)
        os.unlink(f"{_FOLDER}/{name}")
        return "", -1
    return name, descriptor


def _mapped(group: Group, name: str, descriptor: int) -> SharedMemory | None:
    if not name:
        return None
    try:
        if descriptor < 0:
            descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW)
        return SharedMemory(descriptor, group.rank, group.size, private_groups.timeout_s(group.pg))
    except OSError:
        return None
