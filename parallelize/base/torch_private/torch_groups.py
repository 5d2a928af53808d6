"""Private names of torch for process groups, and for ranks that are simulated.

Each entry says what it is for, and in which version it first appeared. An absent name disables the feature that needs
it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from parallelize.base.patches import active as patches


def call_options(kind: str, asynchronous: bool) -> Any:
    """The options "Allreduce", "Allgather" or "ReduceScatter" of a call (2.9); backends only read them.

    A call that is not asynchronous is run by NCCL on the current stream, where nothing can run beside it.
    """
    options = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    options.asyncOp = asynchronous
    return options


def timeout_s(pg: dist.ProcessGroup) -> float:
    """Seconds that a collective of this gloo group waits for other ranks (the backend's options: 2.6)."""
    try:
        return float(pg._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 1800.0


def default_store() -> Any | None:
    """The store of the default process group, for messages that must not depend on matching collectives."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    except (ImportError, AttributeError, ValueError):
        return None


def known_groups() -> list[dist.ProcessGroup]:
    """The groups in PyTorch's registry that this rank has made or belongs to. Any thread may use these groups."""
    from torch.distributed.distributed_c10d import _world

    return [group for group in _world.pg_map if getattr(group, "group_desc", "") != _OWN]


_groups_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # by the default group of a rank

_counting = threading.Lock()

_next_name = threading.local()

_OWN = "parallelize: of one object"


def orders_groups() -> bool:
    """Whether the ranks of a new group can have another order than that of their numbers (2.12)."""
    return "sort_ranks" in signature(dist.new_group).parameters


def new_local_group(ranks: Sequence[int], name: str, *, own: bool = False, **options: Any) -> dist.ProcessGroup:
    """`dist.new_group`, called on the listed ranks alone, whatever other groups each of them is in.

    PyTorch (2.13) names such a group by its ranks and by the number of groups that the *calling* rank is in. If members
    are in unequal numbers of groups (the first and the last stage share a tie, those between do not), each waits for a
    name that no other member uses. Here it is `name` and a count of the groups of exactly these ranks, which are the
    same on all members.

    2.15 counts such a group on its members alone, and names the groups that all ranks make by that count: it is set
    back.

    own: leave the group out of `known_groups`, because another thread uses it.
    """
    from torch.distributed.distributed_c10d import _world as world

    _install_names()
    _next_name.value = f"parallelize_{name}_{_count_groups_of(tuple(ranks))}"
    if list(ranks) != sorted(ranks):
        options["sort_ranks"] = False
    if own:
        options["group_desc"] = _OWN
    count = world.group_count
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        _next_name.value = None
        world.group_count = count


def _count_groups_of(ranks: tuple[int, ...]) -> int:
    """How many groups of exactly these ranks there are with the next one. One thread at a time counts."""
    with _counting:
        counts = _groups_made.setdefault(dist.group.WORLD, Counter())
        counts[ranks] += 1
        return counts[ranks]


def _install_names() -> None:
    """Patch torch's naming of local groups so that `new_local_group` chooses the name, per thread. A version of torch
    that names groups in another way is left alone."""
    from torch.distributed import distributed_c10d

    patches.replace(distributed_c10d, "_hash_ranks_to_str", _named_here)


def _named_here(stock: Any) -> Any:
    return lambda ranks: getattr(_next_name, "value", None) or stock(ranks)


def symmetric_ops() -> Any:
    """The `symm_mem` ops, which exist once the module that defines them is imported (since 2.5)."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def enable_symmetric_memory(pg: dist.ProcessGroup) -> str:
    """Enable symmetric memory on a group and map some; return an empty string, or why this rank cannot. A
    collective."""
    try:
        from torch.distributed._symmetric_memory import (
            enable_symm_mem_for_group,
            get_symm_mem_workspace,
            is_symm_mem_enabled_for_group,
        )
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    try:
        if not is_symm_mem_enabled_for_group(pg.group_name):
            enable_symm_mem_for_group(pg.group_name)
        get_symm_mem_workspace(pg.group_name, min_size=1)  # devices that cannot map each other's memory show it here
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return (
            f"the group does not support symmetric memory: {str(error).partition(chr(10))[0] or type(error).__name__}"
        )
    return ""


try:  # simulation of all ranks in one process, private since 2.9
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
except ImportError:
    LocalTensor = LocalTensorMode = None  # type: ignore[assignment,misc]


def local_tensor(by_rank: dict[int, torch.Tensor]) -> Any:
    """A tensor that contains the local tensor of every rank."""
    return LocalTensor(by_rank)


def on_rank(value: Any, rank: int) -> Any:
    """One rank's local tensor of a simulated tensor; any other value is the same on all ranks."""
    return value._local_tensors[rank] if LocalTensor is not None and isinstance(value, LocalTensor) else value


def simulated_groups(pg: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of this group and of its parallel groups on the mesh: under `LocalTensorMode` one call simulates them
    all."""
    from torch.distributed._local_tensor._c10d import _prepare_collective_groups

    ranks, offsets = _prepare_collective_groups(pg)[:2]  # 2.13 adds a third
    return [[offset + rank for rank in ranks] for offset in offsets]


def fake_store() -> Any:
    """A store for the fake process group, whose collectives do nothing (since 2.0)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work() -> Any:
    """A completed `Work`, boxed as dispatcher ops return it, for collectives that send nothing (since 2.4)."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def group_of_op(argument: Any) -> dist.ProcessGroup:
    """The process group among a dispatcher op's arguments (since 2.1)."""
    return dist.ProcessGroup.unbox(argument)


def ranks_of_op(args: tuple) -> tuple[int, ...]:
    """The global ranks of the process group among a dispatcher op's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(group_of_op(argument)))
            except (RuntimeError, TypeError, ValueError):  # the reduce op is a ScriptObject too
                continue
    raise RuntimeError("a collective without a process group")


def threaded_groups() -> Any:
    """PyTorch's process group whose ranks are threads of one process, which its own tests use (since 1.13).

    Where it is absent, ranks cannot be threads, and `verify` needs `backend="gloo"`.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11's threaded group lacks what destroying one reads
        threaded.ThreadLocalWorld.comms = property(lambda self: [])
    return threaded


_ranks_are_threads = False


def ranks_are_threads() -> bool:
    """Whether another thread of this process would be another rank."""
    return _ranks_are_threads


@contextmanager
def threads_as_ranks(group_class: type) -> Iterator[None]:
    """Inside, every thread is a rank with process groups of its own, of the class `group_class` (see
    `threaded_groups`)."""
    global _ranks_are_threads
    threaded = threaded_groups()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    _ranks_are_threads = True
    try:
        with patches.within(threaded, "ProcessLocalGroup", group_class):
            yield
    finally:
        _ranks_are_threads = False
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]


def functional_collectives() -> Any:
    """The module by whose functions DTensors and user code call functional collectives, which call process groups from
    C++ (2.0)."""
    return torch.distributed._functional_collectives


_by_name: Any = dist.distributed_c10d._resolve_process_group


def group_of_functional(group: Any) -> dist.ProcessGroup | None:
    """The process group that a functional collective is called with, in any of its forms (2.0); None where it is not
    known."""
    try:
        resolved: Any = functional_collectives()._resolve_group(group)
        if isinstance(resolved, str):
            resolved = _by_name(resolved)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return resolved if isinstance(resolved, dist.ProcessGroup) else None
