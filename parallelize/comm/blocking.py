"""Blocking collectives on a process group, called without the Python wrappers of `torch.distributed`.

A wrapper costs 2 to 3 us a call, as much as the call itself: it logs errors, builds its options anew, and looks for
coalescing contexts and tensor subclasses, none of which occur inside a planned module. Both ways end in the same method
of the process group and the same dispatched op, so profilers, traces and fake groups see no difference. Compilers,
which know the wrappers alone, and complex tensors, which the wrappers view as real ones, take the wrapper. While
PyTorch's `CommDebugMode` counts, they are functional collectives, by whose names it counts. Sums and gathers of a group
that shares memory go through it (`same_host`).
"""

from __future__ import annotations

from operator import attrgetter

import torch
import torch.distributed as dist

from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_tensors import counts_collectives, num_dispatch_modes
from parallelize.comm import functional, turns
from parallelize.comm.shared_memory import SharedMemory

# torch 2.13 renamed these, and warns about the old names
_RENAMED = hasattr(dist, "all_gather_single")
wrapped_all_gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
wrapped_reduce_scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
_all_gather = attrgetter("all_gather_single" if _RENAMED else "_allgather_base")
_reduce_scatter = attrgetter("reduce_scatter_single" if _RENAMED else "_reduce_scatter_base")

# options of each kind: of a call beside which nothing runs, and of one during which the other computation has its turn
_SUM, _GATHER, _SCATTER = (
    tuple(private_groups.call_options(kind, in_turns) for in_turns in (False, True))
    for kind in ("Allreduce", "Allgather", "ReduceScatter")
)


def all_reduce(x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    """Sum a contiguous tensor over ranks, in place."""
    if not _is_plain(x):
        _all_reduce_otherwise(x, pg)
    elif (work := pg.allreduce([x], _SUM[0])) is not None:  # some backends have waited already, and return nothing
        work.wait()


def all_gather(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    """Contiguous [n, ...] on each rank -> `out` [size * n, ...]."""
    if not _is_plain(x):
        _all_gather_otherwise(out, x, pg)
    elif (work := _all_gather(pg)(out, x, _GATHER[0])) is not None:
        work.wait()


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    """Contiguous [size * n, ...] on each rank -> this rank's [n, ...] of the sum, in `out`."""
    if not _is_plain(x):
        _reduce_scatter_otherwise(out, x, pg)
    elif (work := _reduce_scatter(pg)(out, x, _SCATTER[0])) is not None:
        work.wait()


def _is_plain(x: torch.Tensor) -> bool:
    """Whether only the process group has to be asked: nothing traces or counts, shares memory or takes turns."""
    return not (
        torch.compiler.is_compiling() or turns.running or SharedMemory.active or num_dispatch_modes() or x.is_complex()
    )


# -- the other ways --------------------------------------------------------------------------------------------------


def _all_reduce_otherwise(x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    if _needs_wrapper(x):
        dist.all_reduce(x, group=pg)
    elif counts_collectives():
        functional.all_reduce(x, pg)
    elif (memory := shared_by(pg, x)) is not None:
        memory.reduce(x)
    else:
        _wait(pg.allreduce([x], _SUM[turns.takes_turns()]))


def _all_gather_otherwise(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    if _needs_wrapper(x):
        wrapped_all_gather(out, x, group=pg)
    elif counts_collectives():
        functional.all_gather(out, x, pg)
    elif (memory := shared_by(pg, x)) is not None:
        memory.all_gather(out, x)
    else:
        _wait(_all_gather(pg)(out, x, _GATHER[turns.takes_turns()]))


def _reduce_scatter_otherwise(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    if _needs_wrapper(x):
        wrapped_reduce_scatter(out, x, group=pg)
    elif counts_collectives():
        functional.reduce_scatter(out, x, pg)
    else:
        _wait(_reduce_scatter(pg)(out, x, _SCATTER[turns.takes_turns()]))


def shared_by(pg: dist.ProcessGroup, x: torch.Tensor) -> SharedMemory | None:
    """The memory through which this tensor is exchanged, where `through_shared_memory` is active for the group."""
    memory = SharedMemory.active.get(pg) if SharedMemory.active else None
    return memory if memory is not None and memory.takes(x) else None


def _needs_wrapper(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or x.is_complex()


def _wait(work: dist.Work | None) -> None:
    """After the other computation had its turn."""
    if work is not None:
        try:
            turns.yield_turn()
        finally:
            work.wait()
