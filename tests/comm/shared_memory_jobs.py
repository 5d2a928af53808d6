"""What ranks do with the memory that they share, and without it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from parallelize import HandshakeError, build_mesh
from parallelize.comm.groups import Group
from parallelize.comm.same_host import through_shared_memory
from parallelize.comm.shared_memory import DTYPES, SLOT_BYTES, SharedMemory

SIZES = [(1,), (3, 5), (8, 512), (0, 4), (SLOT_BYTES + 1,)]


def value_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


def world_group(size: int) -> Group:
    return Group(build_mesh("cpu", tp=size).get_group())


def all_wrong(rank: int, size: int) -> list[str]:
    """Results that are not those of a loop over the ranks, in their order; and whether shared memory was used at
    all."""
    group, wrong, turn = world_group(size), [], 0
    with through_shared_memory(group, "cpu"):
        for dtype in (torch.float32, *sorted(DTYPES, key=str)):
            for shape in SIZES:
                turn += 1
                values = [value_of(other, shape, dtype, turn) for other in range(size)]
                total = values[rank].clone()
                group.all_reduce(total)
                largest = values[rank].clone()
                group.all_reduce(largest, dist.ReduceOp.MAX)
                gathered = group.all_gather(values[rank])
                in_order = values[0]
                for value in values[1:]:
                    in_order = in_order + value
                same = torch.equal(total, in_order) and torch.equal(gathered, torch.stack(values))
                wrong += [] if same and torch.equal(largest, torch.stack(values).amax(0)) else [f"{dtype} {shape}"]
        wrong += [] if group.state.shared_memory is SharedMemory.active[group.pg] else ["not used"]
    return wrong + (["left active"] if SharedMemory.active else [])


def late_ranks(rank: int, size: int, turns: int) -> int:
    """Exchanges in which now one rank is late and now another; returns how many results are wrong."""
    group, wrong = world_group(size), 0
    with through_shared_memory(group, "cpu"):
        for turn in range(turns):
            if turn % (7 + rank) == 0:
                time.sleep(0.0003 * rank)
            x = torch.full((turn % 50 + 1,), float(turn * (rank + 1)))
            group.all_reduce(x)
            wrong += int(not bool((x == turn * size * (size + 1) / 2).all()))
    return wrong


def ruled_out_by_one_rank(rank: int, reason: str) -> tuple[bool, float, bool]:
    """(whether memory was used, a sum, whether it is used afterwards)."""
    group, x = world_group(2), torch.tensor([rank + 1.0])
    SharedMemory.is_allowed = not (rank == 1 and reason == "watch")
    counting = CommDebugMode() if rank == 1 and reason == "counting" else nullcontext()
    with counting, through_shared_memory(group, "cpu"):
        used = group.pg in SharedMemory.active
        group.all_reduce(x)
    SharedMemory.is_allowed = True
    with through_shared_memory(group, "cpu"):
        return used, float(x), group.pg in SharedMemory.active


def no_memory_on_one_rank(rank: int) -> tuple[bool, float, bool]:
    """The file cannot be opened by one rank, as on another host: (whether memory was used, a sum, whether it is tried
    again)."""
    from parallelize.comm import same_host

    group = Group(dist.new_group([0, 1]))
    stock, tries = same_host._mapped, []

    def mapped(*args: Any) -> Any:
        tries.append(args)
        return None if rank == 1 else stock(*args)

    same_host._mapped = mapped
    x = torch.tensor([rank + 1.0])
    try:
        for _ in range(2):
            with through_shared_memory(group, "cpu"):
                used = group.pg in SharedMemory.active
                group.all_reduce(x)
    finally:
        same_host._mapped = stock
    return used, float(x), len(tries) > 1


def one_does_not_come(rank: int, leaves: bool) -> tuple[str, float]:
    """One rank is late, or leaves with an error: (the error of the rank that waits, a sum over new memory after it)."""
    group, slug = Group(dist.new_group([0, 1], timeout=timedelta(seconds=1))), ""
    try:
        with through_shared_memory(group, "cpu"):
            if rank == 1:
                time.sleep(0.0 if leaves else 1.7)
                raise KeyError
            group.all_reduce(torch.ones(3))
    except HandshakeError as error:
        slug = error.slugs[0] + " " + error.problems[0].what
    except KeyError:
        time.sleep(0.6 if leaves else 0.0)
    x = torch.tensor([rank + 1.0])
    with through_shared_memory(group, "cpu"):
        group.all_reduce(x)
        assert group.pg in SharedMemory.active
    return slug, float(x)
