"""Many ranks in one process, as threads: real tensors, the code of real ranks, no torchrun.

This is PyTorch's threaded process group with three additions: point-to-point messages, collectives whose calls are
compared before they run, and deadlock detection. When all ranks wait for each other, the smallest collectives that can
never complete fail on their ranks at once, as they would fail after a timeout on a network. A process runs one such
group of ranks at a time.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import HandshakeError, Problem
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_parametrize import of_each_thread
from parallelize.state.randomness.dropout.host_draws import host_states, set_host_states

TIMEOUT_S = 120.0
_GRACE_S = 5.0  # for other threads to end after one has failed
_STOP_S = 1.0  # for threads to end after they were stopped

_RUN_LOCK = threading.Lock()
_LOCAL = threading.local()  # .world, on the thread of a rank
_UNSTOPPABLE: list[threading.Thread] = []
"""Threads of earlier runs that still run. They belong to the process, which asks for them when it exits."""
_stock: Any = private_groups.threaded_groups()


class Stopped(SystemExit):
    """Ends a rank because another one has failed. It is not an `Exception`, so that no handler in a model catches
    it."""


class _Rendezvous:
    """A collective or message for which ranks wait."""

    def __init__(self, lock: threading.Lock, what: str, size: int):
        self.ready = threading.Condition(lock)
        self.what, self.size = what, size
        self.data: dict[int, Any] = {}  # by rank in the group
        self.calls: dict[int, str] = {}  # what each rank called, as text that must be the same on all of them
        self.waiting = 0
        self.done = False
        self.failure = ""


class _World:
    """The state that the ranks of one run have in common."""

    def __init__(self, size: int, timeout_s: float):
        self.lock = threading.Lock()
        self.running, self.blocked, self.timeout_s = size, 0, timeout_s
        self.stopped = False  # a rank has failed, or the run is over
        self.over = False  # the run is over: a thread that still runs must change nothing any more
        self.pending: dict[Any, _Rendezvous] = {}
        self.messages: dict[Any, deque[list[torch.Tensor]]] = {}  # sent and not yet received

    def join(self, key: Any, what: str, size: int, *, rank: int, call: str, data: Any, work: Callable) -> None:
        """Take part in a collective. The last rank that joins does the work of all.

        Args:
            key: the same for the same collective on every rank.
            what: the collective in an error message.
            size, rank: size of the group, and the rank in it.
            call: must be the same on every rank.
            data, work: `work` is called with the list of every rank's `data`.
        """
        with self.lock:
            self._raise_if_stopped()
            rendezvous = self.pending.setdefault(key, _Rendezvous(self.lock, what, size))
            rendezvous.data[rank], rendezvous.calls[rank] = data, call
            if len(rendezvous.data) < size:
                self._wait(key, rendezvous)
                return
            del self.pending[key]
        failure = _mismatch(rendezvous)
        try:
            if not failure:
                work([rendezvous.data[member] for member in range(size)])
        except Exception as error:  # usually sizes that do not match
            failure = f"{what} failed: {error}"
        with self.lock:
            self._complete(rendezvous, failure)
        if failure:
            raise RuntimeError(failure)

    def send(self, key: Any, tensors: list[torch.Tensor]) -> None:
        """Store a message, without waiting for the receiver."""
        with self.lock:
            self._raise_if_stopped()
            self.messages.setdefault(key, deque()).append(tensors)
            rendezvous = self.pending.pop(key, None)
            if rendezvous is not None:
                self._complete(rendezvous, "")

    def receive(self, key: Any, what: str) -> list[torch.Tensor]:
        """Wait for a message and take it."""
        with self.lock:
            self._raise_if_stopped()
            if not self.messages.get(key):
                self._wait(key, self.pending.setdefault(key, _Rendezvous(self.lock, what, 2)))
            return self.messages[key].popleft()

    def has_message(self, key: Any) -> bool:
        with self.lock:
            self._raise_if_stopped()
            return bool(self.messages.get(key))

    def leave(self, failed: bool) -> None:
        """Called by a rank that has ended."""
        with self.lock:
            self.running -= 1
            if failed:
                self._stop()
            else:
                self._fail_if_deadlocked()

    def end(self) -> None:
        """End the run. Ranks that still run fail at their next collective."""
        with self.lock:
            self.over = True
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        for rendezvous in self.pending.values():
            rendezvous.ready.notify_all()

    def _raise_if_stopped(self) -> None:
        if self.stopped:
            raise Stopped("the run is over" if self.over else "another rank has failed")

    def _wait(self, key: Any, rendezvous: _Rendezvous) -> None:
        rendezvous.waiting += 1
        self.blocked += 1
        self._fail_if_deadlocked()
        if not rendezvous.ready.wait_for(lambda: rendezvous.done or self.stopped, self.timeout_s):
            self.pending.pop(key, None)
            self._complete(rendezvous, f"{rendezvous.what}: no answer in {self.timeout_s:g} s")
        if not rendezvous.done:
            self._raise_if_stopped()
        if rendezvous.failure:
            raise RuntimeError(rendezvous.failure)

    def _complete(self, rendezvous: _Rendezvous, failure: str) -> None:
        rendezvous.done, rendezvous.failure = True, failure
        self.blocked -= rendezvous.waiting  # before the ranks wake: they are not deadlocked any more
        rendezvous.waiting = 0
        rendezvous.ready.notify_all()

    def _fail_if_deadlocked(self) -> None:
        """If every running rank waits, fail the pending rendezvous of the smallest groups, so that their ranks
        continue."""
        if self.blocked < self.running or not self.running:
            return
        stuck = {key: rendezvous for key, rendezvous in self.pending.items() if rendezvous.waiting}
        if not stuck:
            return
        smallest = min(rendezvous.size for rendezvous in stuck.values())
        names = "; ".join(sorted({rendezvous.what for rendezvous in stuck.values()}))
        for key, rendezvous in stuck.items():
            if rendezvous.size == smallest:
                del self.pending[key]
                self._complete(rendezvous, f"{rendezvous.what} can never complete, ranks wait for each other: {names}")


def _mismatch(rendezvous: _Rendezvous) -> str:
    """How the calls of the ranks differ; empty where they are the same."""
    calls = sorted(set(rendezvous.calls.values()))
    if len(calls) == 1:
        return ""
    ranks = {call: [rank for rank, own in rendezvous.calls.items() if own == call] for call in calls}
    who = "; ".join(f"{call} on {ranks[call]}" for call in calls)
    return f"{rendezvous.what}: ranks of the group call different things: {who}"


class ThreadGroup(_stock.ProcessLocalGroup):
    """A process group whose ranks are threads."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size)
        self.count = 0

    def _ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self))

    def _collective(self, name: str, work: Any, data: Any, shapes: str = "") -> Any:
        """Run a collective. `shapes`: what must be the same on every rank, besides the name."""
        ranks, self.count = self._ranks(), self.count + 1
        world: _World = _LOCAL.world
        key, what = (self.pg_name, ranks, self.count), f"{name} of ranks {list(ranks)}"
        call = f"{name} {shapes}".strip()
        world.join(key, what, len(ranks), rank=self._rank, call=call, data=data, work=work.work)
        return _stock.ret_work(data)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._collective("all_reduce", _stock.AllReduce(opts.reduceOp), tensors, _shapes(tensors))

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._collective("all_gather", _stock.AllGather(), (outputs, inputs), _shapes(inputs))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.allgather([list(torch.chunk(output, self._world_size))], [input])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        return self._collective("broadcast", _stock.Broadcast(opts.rootRank), tensors, _shapes(tensors))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._collective("scatter", _stock.Scatter((opts or dist.ScatterOptions()).rootRank), (outputs, inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._collective("gather", _stock.Gather((opts or dist.GatherOptions()).rootRank), (outputs, inputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = _stock.ReduceScatter((opts or dist.ReduceScatterOptions()).reduceOp)
        return self._collective("reduce_scatter", work, (outputs, inputs), _shapes(inputs[0]))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(torch.chunk(input, self._world_size))], opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._collective("all_to_all", _stock.AllToAll(), (outputs, inputs))

    def all_to_all_single(self, output: Any, input: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        return self._collective("all_to_all", _stock.AllToAllBase(), (output, input, received, sent))

    # names before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        ranks = self._ranks()
        _LOCAL.world.send(("message", self.pg_name, ranks, self._rank, to, tag), [x.detach().clone() for x in tensors])
        return _stock.ret_work(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        ranks = self._ranks()
        what = f"a message from rank {ranks[source]} to rank {ranks[self._rank]}"
        return _Receive(_LOCAL.world, ("message", self.pg_name, ranks, source, self._rank, tag), what, tensors)


class _Receive:
    """The work that `irecv` returns. `wait` copies the message into the tensors."""

    def __init__(self, world: _World, key: Any, what: str, tensors: list[torch.Tensor]):
        self.world, self.key, self.what, self.tensors = world, key, what, tensors
        self.done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            self.done = True
            with torch.no_grad():
                for target, sent in zip(self.tensors, self.world.receive(self.key, self.what), strict=True):
                    target.detach().copy_(sent)
        return True

    def is_completed(self) -> bool:
        return self.done or self.world.has_message(self.key)


def _shapes(tensors: Any) -> str:
    return " ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def run_ranks(world_size: int, body: Callable[[int], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Run `body(rank)` as a thread for every rank, and return the results in rank order.

    Raises: the first failure of a rank; HandshakeError `ranks-timed-out`.
    """
    with (
        _RUN_LOCK,
        private_groups.threads_as_ranks(ThreadGroup),
        _hide_gc_objects(),
        _own_parametrizations(),
        _kept_host_generators(),
    ):
        return _Run(world_size, body, timeout_s).outcome()


@contextmanager
def _kept_host_generators() -> Iterator[None]:
    """Set Python's and NumPy's generators, which all ranks share, to their states of before at the end."""
    states = host_states(("python", "numpy"))
    try:
        yield
    finally:
        set_host_states(states)


@contextmanager
def _hide_gc_objects() -> Iterator[None]:
    """Let `gc.get_objects` return an empty list.

    The real one returns tuples that other threads are still building, which then fail with a SystemError:
    github.com/python/cpython issue 59313 (bpo-15108). In this package only the search for optimizers that were built
    too early calls it.
    """
    with patches.within(gc, "get_objects", lambda generation=None: []):
        yield


@contextmanager
def _own_parametrizations() -> Iterator[None]:
    """Let each rank have the values of parametrized parameters that PyTorch keeps in a block, as its own process."""
    owner, values = of_each_thread()
    with ExitStack() as changes:
        for name, value in values.items():
            changes.enter_context(patches.within(owner, name, value))
        yield


class _Run:
    """The threads of one run, with their results and failures."""

    def __init__(self, world_size: int, body: Callable[[int], Any], timeout_s: float):
        self.world, self.store = _World(world_size, timeout_s), dist.HashStore()
        self.body, self.world_size = body, world_size
        self.results: list[Any] = [None] * world_size
        self.failures: list[tuple[int, BaseException]] = []
        self.threads = [threading.Thread(target=self._rank, args=(rank,), daemon=True) for rank in range(world_size)]

    def _rank(self, rank: int) -> None:
        _LOCAL.world = self.world
        failed = True
        try:
            dist.init_process_group("threaded", rank=rank, world_size=self.world_size, store=self.store)
            try:
                self.results[rank] = self.body(rank)
                failed = False
            finally:
                with self.world.lock:  # the run must not end between the question and the answer
                    if not self.world.over:  # otherwise the default group is the caller's
                        dist.destroy_process_group()
        except BaseException as error:  # `outcome` raises it on the calling thread
            failed = True
            self.failures.append((rank, error))
            if not isinstance(error, Stopped):
                error.__notes__ = [*getattr(error, "__notes__", []), f"rank {rank}:\n{traceback.format_exc()}"]
        finally:
            self.world.leave(failed)

    def outcome(self) -> list[Any]:
        """Start all threads and wait for them. Raises as `run_ranks` does."""
        for thread in self.threads:
            thread.start()
        try:
            _wait_for_ranks(self.threads, self.world.timeout_s, self.failures)
        finally:
            late = [rank for rank, thread in enumerate(self.threads) if thread.is_alive()]
            if late:
                _stop(self.world, self.threads)
        first = min(self.failures, key=lambda item: (isinstance(item[1], SystemExit), item[0]), default=None)
        if first is not None and not isinstance(first[1], Stopped):
            raise first[1]
        if late or first is not None:
            what = f"ranks {late} still run after {self.world.timeout_s:g} s"
            fix = "look for an endless loop in the model, or set a longer timeout"
            raise HandshakeError(Problem("ranks-timed-out", what, fix=fix))
        return self.results


def _wait_for_ranks(threads: list[threading.Thread], timeout_s: float, failures: list) -> None:
    """Wait for all ranks until one deadline, or for a grace period after one has failed."""
    deadline = time.monotonic() + timeout_s
    while alive := [thread for thread in threads if thread.is_alive()]:
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            alive[0].join(max(0.0, deadline - time.monotonic()))
            _join_until(alive, deadline)
            return
        if time.monotonic() >= deadline:
            return
        alive[0].join(min(0.1, max(0.0, deadline - time.monotonic())))


def _join_until(threads: list[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _stop(world: _World, threads: list[threading.Thread]) -> None:
    """End ranks that still run: in Python at their next line, in a collective where they wait."""
    world.end()
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for thread in threads:
        if thread.is_alive() and thread.ident is not None:
            raise_in_thread(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))
    _join_until(threads, time.monotonic() + _STOP_S)
    _UNSTOPPABLE[:] = [thread for thread in (*_UNSTOPPABLE, *threads) if thread.is_alive()]


def still_running() -> bool:
    """Whether threads of an earlier run could not be stopped. Python aborts when it exits while they run."""
    return any(thread.is_alive() for thread in _UNSTOPPABLE)
