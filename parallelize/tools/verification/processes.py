"""Processes that are started and ended here, one for each rank, over gloo. They have one deadline, and print no
traceback."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import HandshakeError, MeshError, ParallelizeError, Problem
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.user_code import location_of
from parallelize.comm.groups import destroy_groups
from parallelize.tools.verification.configuration import Request
from parallelize.tools.verification.runner import ProgressCallback, RunResult, on_this_rank
from parallelize.tools.verification.user_errors import summary

_LOOPBACK = "127.0.0.1"
_START_S = 60.0  # for every process to load Python and torch, in addition to the timeout
_GRACE_S = 5.0  # for the others to respond after one process has failed


def on_gloo(request: Request, tell: ProgressCallback) -> RunResult:
    """Run every rank in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    # of this process, which binds it before the ranks start: a free port that is handed on may be taken by a connection
    # meanwhile
    store = _loopback_store()
    workers: list[tuple[Any, Any]] = []
    tell(f"starting {request.mesh.world_size} processes")
    try:
        with _sigint_blocked():
            for rank in range(request.mesh.world_size):
                parent_end, child_end = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(request, rank, store.port, child_end), daemon=True)
                process.start()
                child_end.close()
                workers.append((process, parent_end))
        return _Answers(workers, request.timeout_s, tell).result()
    finally:
        for _, pipe in workers:
            pipe.close()
        deadline = time.monotonic() + 1.0
        for process, _ in workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _loopback_store() -> Any:
    """A store that only this machine reaches. TCPStore alone would listen on every interface."""
    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes that are started inside never receive SIGINT. This process receives it at the end, and ends them."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock the signal
    received: list[int] = []  # by a thread that was there before, such as a store's, for which nothing is blocked
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if received:
            signal.raise_signal(signal.SIGINT)


class _Answers:
    """What the processes send: progress ("at"), and at the end a result ("ok"), a "mistake", or why the rank was
    "lost"."""

    def __init__(self, workers: list[tuple[Any, Any]], timeout_s: float, tell: ProgressCallback):
        self.processes = [process for process, _ in workers]
        self.pipes = [pipe for _, pipe in workers]
        self.timeout_s, self.tell = timeout_s, tell
        self.last: dict[int, tuple[str, Any]] = {}  # the last message of each rank that has ended
        self.deadline = time.monotonic() + _START_S + timeout_s

    def result(self) -> RunResult:
        """Rank 0's result. Raises: ParallelizeError: that of a rank, else `ranks-lost`, `ranks-timed-out`."""
        while len(self.last) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in self.last]
            ready = connection.wait(waiting, max(0.0, self.deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                self._receive(self.pipes.index(pipe))
        self._raise_failures()
        return self.last[0][1]

    def _receive(self, rank: int) -> None:
        try:
            kind, value = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(1.0)
            kind, value = "lost", f"rank {rank} ended with exit code {self.processes[rank].exitcode}"
        if kind == "at":
            if not self.last:
                self.deadline = time.monotonic() + self.timeout_s
            if value and rank == 0:
                self.tell(value)
            return
        self.last[rank] = kind, value
        if kind != "ok":
            self.deadline = min(self.deadline, time.monotonic() + _GRACE_S)

    def _raise_failures(self) -> None:
        mistakes = [value for kind, value in self.last.values() if kind == "mistake"]
        if mistakes:
            raise min(mistakes, key=lambda error: "ranks-missing" in error.slugs)
        lost = [value for kind, value in self.last.values() if kind == "lost"]
        if lost:
            fix = "run with --backend threads to see what fails"
            raise HandshakeError(Problem("ranks-lost", lost[0], fix=fix))
        missing = [rank for rank in range(len(self.pipes)) if rank not in self.last]
        if missing:
            what = f"ranks {missing} did not answer in {self.timeout_s:g} s"
            fix = "look for an endless loop in the model, or set a longer timeout"
            raise HandshakeError(Problem("ranks-timed-out", what, fix=fix))


def _serve(request: Request, rank: int, port: int, pipe: Any) -> None:
    """Run one rank, send its result, and exit without tearing anything down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    _send(pipe, "at", "")
    try:
        size, timeout = request.mesh.world_size, timedelta(seconds=request.timeout_s)
        address = dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=address, rank=rank, world_size=size, timeout=timeout)
        default: Any = private_groups.default_store()
        store = dist.PrefixStore("verify", default)
        with torch.enable_grad():
            _send(pipe, "ok", on_this_rank(request, "cpu", store, lambda text: _send(pipe, "at", text)))
    except ParallelizeError as error:
        _send(pipe, "mistake", error)
    except BaseException as error:
        location = location_of(error)
        _send(pipe, "lost", f"rank {rank}: {summary(error)}" + (f" ({location})" if location else ""))
    with suppress(OSError):
        # until the parent has all results: the others may not have taken the last messages of this rank
        pipe.poll(30.0)
    os._exit(0)


def _send(pipe: Any, kind: str, value: Any) -> None:
    """Send a message, or exit if the parent no longer receives."""
    try:
        pipe.send((kind, value))
    except OSError:
        os._exit(0)


# -- torchrun --------------------------------------------------------------------------------------------------------
# Verification on the processes that torchrun has started, or in a group that the program has initialized.


_RUNS = itertools.count()  # the same number on every rank, because all ranks call `verify` equally often
_STORE: list[Any] = []
"""The store at torchrun's address, once it is connected. It belongs to the process, as that address does: later runs
must find it, and it ends with the process."""
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
