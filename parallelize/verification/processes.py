"""Real processes that are started here and end here, over gloo: one deadline for all, and no traceback of theirs is shown."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import Any

import torch
import torch.distributed as dist

from parallelize import _torch_private as private
from parallelize.errors import HandshakeError, ParallelizeError, Problem
from parallelize.verification.case import Request
from parallelize.verification.start import Outcomes, Told, on_this_rank
from parallelize.verification.users import place_of, told

_START_S = 60.0  # for Python and torch to be loaded on every one of them, beside the timeout
_GRACE_S = 5.0  # for others, once one has failed


def on_gloo(request: Request, tell: Told) -> Outcomes:
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers: list[tuple[Any, Any]] = []
    tell(f"starting {request.mesh.world_size} processes")
    try:
        with _deaf_to_ctrl_c():
            for rank in range(request.mesh.world_size):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(request, rank, port, theirs), daemon=True)
                process.start()
                theirs.close()
                workers.append((process, ours))
        return _Answers(workers, request.timeout_s, tell).outcomes()
    finally:
        for _, pipe in workers:
            pipe.close()
        until = time.monotonic() + 1.0
        for process, _ in workers:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started inside never hears Ctrl-C: this process does, and ends the others."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which the first process would start, and with it unblock the signal
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


class _Answers:
    """What the processes send: where they are, and in the end an outcome or what went wrong."""

    def __init__(self, workers: list[tuple[Any, Any]], timeout_s: float, tell: Told):
        self.processes = [process for process, _ in workers]
        self.pipes = [pipe for _, pipe in workers]
        self.timeout_s, self.tell = timeout_s, tell
        self.ends: dict[int, tuple[str, Any]] = {}
        self.until = time.monotonic() + _START_S + timeout_s

    def outcomes(self) -> Outcomes:
        """Rank 0's. Raises: ParallelizeError: a rank's own, else `ranks-lost`, `ranks-timed-out`."""
        while len(self.ends) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in self.ends]
            ready = connection.wait(waiting, max(0.0, self.until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                self._take(self.pipes.index(pipe))
        self._raise_mistakes()
        return self.ends[0][1]

    def _take(self, rank: int) -> None:
        try:
            kind, value = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(1.0)
            kind, value = "lost", f"rank {rank} ended with exit code {self.processes[rank].exitcode}"
        if kind == "at":
            if not self.ends:
                self.until = time.monotonic() + self.timeout_s
            if value and rank == 0:
                self.tell(value)
            return
        self.ends[rank] = kind, value
        if kind != "ok":
            self.until = min(self.until, time.monotonic() + _GRACE_S)

    def _raise_mistakes(self) -> None:
        values = {kind: [value for one, value in self.ends.values() if one == kind] for kind in ("mistake", "lost")}
        mistakes = sorted(values["mistake"], key=lambda error: "ranks-missing" in error.slugs)
        if mistakes:
            raise mistakes[0]
        if values["lost"]:
            fix = "run with --backend threads to see what fails"
            raise HandshakeError(Problem("ranks-lost", values["lost"][0], fix=fix))
        missing = [rank for rank in range(len(self.pipes)) if rank not in self.ends]
        if missing:
            what = f"ranks {missing} did not answer in {self.timeout_s:g} s"
            fix = "a loop that does not end, or too little time: a longer timeout"
            raise HandshakeError(Problem("ranks-timed-out", what, fix=fix))


def _serve(request: Request, rank: int, port: int, pipe: Any) -> None:
    """One rank: answers before anything is torn down."""
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    _send(pipe, "at", "")
    try:
        address = f"tcp://127.0.0.1:{port}"
        size, timeout = request.mesh.world_size, timedelta(seconds=request.timeout_s)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timeout)
        default: Any = private.default_store()
        store = dist.PrefixStore("verify", default)
        with torch.enable_grad():
            _send(pipe, "ok", on_this_rank(request, "cpu", store, lambda text: _send(pipe, "at", text)))
    except ParallelizeError as error:
        _send(pipe, "mistake", error)
    except BaseException as error:
        place = place_of(error)
        _send(pipe, "lost", f"rank {rank}: {told(error)}" + (f" ({place})" if place else ""))
    with suppress(OSError):
        pipe.poll(30.0)  # until the parent has read it: the store must not end before the others have
    os._exit(0)


def _send(pipe: Any, kind: str, value: Any) -> None:
    """Where nobody listens any more there is nobody to tell."""
    try:
        pipe.send((kind, value))
    except OSError:
        os._exit(0)
