"""Many ranks in one process, as threads: real numbers, real rank-dependent code, no torchrun.

PyTorch's own threaded process group, with what it lacks: messages from rank to rank, collectives that are compared before
they run, and waiting that ends. When all ranks wait for one another, one of the collectives that cannot come about fails
on its ranks, as a timeout would have it on a network, at once. One such run at a time in a process.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallelize import _torch_private as private
from parallelize.errors import HandshakeError, Problem

TIMEOUT_S = 120.0
_GRACE_S = 5.0  # for threads to end after one of them has failed
_LAST_S = 1.0  # and once they were told to

_RUN = threading.Lock()
_HERE = threading.local()  # .world of the thread that is a rank
_LEFT: list[threading.Thread] = []
_stock: Any = private.threaded_groups()


class Stopped(SystemExit):
    """Ends a rank because another one has failed. No `Exception`, so that nothing takes it for its own."""


class _Meeting:
    """Ranks that wait for one another, in one collective or for one message."""

    def __init__(self, world: _World, what: str, size: int):
        self.ready = threading.Condition(world.lock)
        self.what, self.size = what, size
        self.data: dict[int, Any] = {}
        self.kinds: dict[int, str] = {}
        self.waiting = 0
        self.done = False
        self.failure = ""


class _World:
    """What the ranks of one run share."""

    def __init__(self, size: int, timeout_s: float):
        self.lock = threading.Lock()
        self.alive, self.blocked, self.timeout_s = size, 0, timeout_s
        self.stopped = False  # a rank has failed
        self.over = False  # the run has ended: what is still alive of it leaves everything alone
        self.meetings: dict[Any, _Meeting] = {}
        self.letters: dict[Any, deque[list[torch.Tensor]]] = {}

    def meet(self, key: Any, what: str, size: int, rank: int, kind: str, data: Any, work: Callable) -> None:
        """One collective: the last rank to come does the work for all."""
        with self.lock:
            self._check()
            meeting = self.meetings.setdefault(key, _Meeting(self, what, size))
            meeting.data[rank], meeting.kinds[rank] = data, kind
            if len(meeting.data) < size:
                self._wait(key, meeting)
                return
            del self.meetings[key]
        failure = _mismatch(meeting)
        try:
            if not failure:
                work([meeting.data[place] for place in range(size)])
        except Exception as error:  # sizes that do not fit, most often
            failure = f"{what} failed: {error}"
        with self.lock:
            self._end(meeting, failure)
        if failure:
            raise RuntimeError(failure)

    def post(self, key: Any, tensors: list[torch.Tensor]) -> None:
        """Leave a message, and go on."""
        with self.lock:
            self._check()
            self.letters.setdefault(key, deque()).append(tensors)
            meeting = self.meetings.pop(key, None)
            if meeting is not None:
                self._end(meeting, "")

    def collect(self, key: Any, what: str) -> list[torch.Tensor]:
        """Take a message, once it is there."""
        with self.lock:
            self._check()
            if not self.letters.get(key):
                self._wait(key, self.meetings.setdefault(key, _Meeting(self, what, 2)))
            return self.letters[key].popleft()

    def has(self, key: Any) -> bool:
        with self.lock:
            self._check()
            return bool(self.letters.get(key))

    def leave(self, failed: bool) -> None:
        """A rank has ended."""
        with self.lock:
            self.alive -= 1
            if failed:
                self.stopped = True
                for meeting in self.meetings.values():
                    meeting.ready.notify_all()
            else:
                self._part_if_stuck()

    def end(self) -> None:
        """Nobody waits for the ranks any more: those that are still there fail at their next collective."""
        with self.lock:
            self.stopped = self.over = True
            for meeting in self.meetings.values():
                meeting.ready.notify_all()

    def _check(self) -> None:
        if self.stopped:
            raise Stopped("the run is over" if self.over else "another rank has failed")

    def _wait(self, key: Any, meeting: _Meeting) -> None:
        meeting.waiting += 1
        self.blocked += 1
        self._part_if_stuck()
        if not meeting.ready.wait_for(lambda: meeting.done or self.stopped, self.timeout_s):
            self.meetings.pop(key, None)
            self._end(meeting, f"{meeting.what}: no answer in {self.timeout_s:g} s")
        if not meeting.done:
            self._check()
        if meeting.failure:
            raise RuntimeError(meeting.failure)

    def _end(self, meeting: _Meeting, failure: str) -> None:
        meeting.done, meeting.failure = True, failure
        self.blocked -= meeting.waiting  # here, not when they wake: they no longer hold up anybody
        meeting.waiting = 0
        meeting.ready.notify_all()

    def _part_if_stuck(self) -> None:
        """All that live wait, so none of it will come about: let the smallest meetings fail, and their ranks go on."""
        if self.blocked < self.alive or not self.alive:
            return
        stuck = {key: meeting for key, meeting in self.meetings.items() if meeting.waiting}
        if not stuck:
            return
        smallest = min(meeting.size for meeting in stuck.values())
        told = "; ".join(sorted({meeting.what for meeting in stuck.values()}))
        for key, meeting in stuck.items():
            if meeting.size == smallest:
                del self.meetings[key]
                self._end(meeting, f"{meeting.what} never comes about, ranks wait for each other: {told}")


def _mismatch(meeting: _Meeting) -> str:
    """What differs between the calls that met; empty where they are one."""
    kinds = sorted(set(meeting.kinds.values()))
    if len(kinds) == 1:
        return ""
    who = [f"{kind} on {[rank for rank, one in meeting.kinds.items() if one == kind]}" for kind in kinds]
    return f"{meeting.what}: ranks of the group call different things: " + "; ".join(who)


class ThreadGroup(_stock.ProcessLocalGroup):
    """A process group of threads."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size)
        self.count = 0

    def _ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self))

    def _meet(self, name: str, work: Any, data: Any, form: Any = "") -> Any:
        """`form`: what must be the same on every rank."""
        ranks, self.count = self._ranks(), self.count + 1
        what = f"{name} of ranks {list(ranks)}"
        world: _World = _HERE.world
        world.meet(
            (self.pg_name, ranks, self.count), what, len(ranks), self._rank, f"{name} {form}".strip(), data, work.work
        )
        return _stock.ret_work(data)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._meet("all_reduce", _stock.AllReduce(opts.reduceOp), tensors, _shapes(tensors))

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._meet("all_gather", _stock.AllGather(), (outputs, inputs), _shapes(inputs))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.allgather([list(torch.chunk(output, self._world_size))], [input])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        return self._meet("broadcast", _stock.Broadcast(opts.rootRank), tensors, _shapes(tensors))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._meet("scatter", _stock.Scatter((opts or dist.ScatterOptions()).rootRank), (outputs, inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._meet("gather", _stock.Gather((opts or dist.GatherOptions()).rootRank), (outputs, inputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = _stock.ReduceScatter((opts or dist.ReduceScatterOptions()).reduceOp)
        return self._meet("reduce_scatter", work, (outputs, inputs), _shapes(inputs[0]))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(torch.chunk(input, self._world_size))], opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._meet("all_to_all", _stock.AllToAll(), (outputs, inputs))

    def all_to_all_single(self, output: Any, input: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        return self._meet("all_to_all", _stock.AllToAllBase(), (output, input, received, sent))

    # names before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        ranks = self._ranks()
        _HERE.world.post(("message", self.pg_name, ranks, self._rank, to, tag), [x.detach().clone() for x in tensors])
        return _stock.ret_work(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        ranks = self._ranks()
        what = f"a message from rank {ranks[source]} to rank {ranks[self._rank]}"
        return _Arrival(_HERE.world, ("message", self.pg_name, ranks, source, self._rank, tag), what, tensors)


class _Arrival:
    """What `irecv` gives: the message lies in its tensors once it was waited for."""

    def __init__(self, world: _World, key: Any, what: str, tensors: list[torch.Tensor]):
        self.world, self.key, self.what, self.tensors = world, key, what, tensors
        self.done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            self.done = True
            with torch.no_grad():
                for target, sent in zip(self.tensors, self.world.collect(self.key, self.what), strict=True):
                    target.detach().copy_(sent)
        return True

    def is_completed(self) -> bool:
        return self.done or self.world.has(self.key)


def _shapes(tensors: Any) -> str:
    return " ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def run_ranks(world_size: int, body: Callable[[int], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Run `body(rank)` on every rank as a thread; return the results in rank order, raise the first failure."""
    with _RUN, private.threads_as_ranks(ThreadGroup), _nobody_lists_objects():
        return _run(world_size, body, timeout_s)


@contextmanager
def _nobody_lists_objects() -> Iterator[None]:
    """Let `gc.get_objects` find nothing meanwhile.

    It hands out tuples that other threads are just building, which then fail with a SystemError: github.com/python/cpython
    issue 59313 (bpo-15108). Of ours, only the search for optimisers that were built too early asks for it.
    """
    stock, gc.get_objects = gc.get_objects, lambda generation=None: []
    try:
        yield
    finally:
        gc.get_objects = stock


def _run(world_size: int, body: Callable[[int], Any], timeout_s: float) -> list[Any]:
    world, store = _World(world_size, timeout_s), dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        _HERE.world = world
        failed = True
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = body(rank)
                failed = False
            finally:
                if not world.over:  # after the end that would be the caller's group
                    dist.destroy_process_group()
        except BaseException as error:  # a thread's failure is raised again by the caller
            failed = True
            failures.append((rank, error))
            if not isinstance(error, Stopped):
                error.__notes__ = [*getattr(error, "__notes__", []), f"rank {rank}:\n{traceback.format_exc()}"]
        finally:
            world.leave(failed)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    try:
        _join(threads, timeout_s, failures)
    finally:
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            _stop(world, threads)
    first = min(failures, key=lambda item: (isinstance(item[1], SystemExit), item[0]), default=None)
    if first is not None and not isinstance(first[1], Stopped):
        raise first[1]
    if late or first is not None:
        what = f"ranks {late} still run after {timeout_s:g} s"
        fix = "look for a loop that does not end in what the model calls, or give more time"
        raise HandshakeError(Problem("ranks-timed-out", what, fix=fix))
    return results


def _join(threads: list[threading.Thread], timeout_s: float, failures: list) -> None:
    """Wait for all ranks until one deadline, and not for long once one has failed."""
    until = time.monotonic() + timeout_s
    while alive := [thread for thread in threads if thread.is_alive()]:
        if failures:
            until = min(until, time.monotonic() + _GRACE_S)
            alive[0].join(max(0.0, until - time.monotonic()))
            _join_until(alive, until)
            return
        if time.monotonic() >= until:
            return
        alive[0].join(min(0.1, max(0.0, until - time.monotonic())))


def _join_until(threads: list[threading.Thread], until: float) -> None:
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _stop(world: _World, threads: list[threading.Thread]) -> None:
    """End ranks that did not end: those that run Python at their next line, those that wait in a collective there."""
    world.end()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for thread in threads:
        if thread.is_alive() and thread.ident is not None:
            raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))
    _join_until(threads, time.monotonic() + _LAST_S)
    _LEFT.extend(thread for thread in threads if thread.is_alive())


def still_running() -> bool:
    """Whether ranks of a run that has ended could not be stopped: Python aborts where it ends beside them."""
    return any(thread.is_alive() for thread in _LEFT)
