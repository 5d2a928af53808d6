"""Real processes for tests: a pool of ranks that stay up, forked from a server that has imported everything.

Ranks compute on the CPU over gloo, or on GPUs over NCCL: `tests.support.device` says which.

Each job is a function of this repository and its arguments. A rank sends its outcome before anything is torn down; a
job that fails or hangs ends the whole pool, and the next job starts a fresh one, in a tenth of a second. A rank that is
silent shows where it waits. Equal meshes of all jobs are one mesh, because every process group has threads that look
for messages all the time.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 60.0
STACK_TIMEOUT_S = 10.0
END_OF_STACK = "in <module>\n"  # of the main thread
PEER_TIMEOUT = "Timed out waiting"  # what gloo says of a peer that sends nothing
_FIRST_PORT = 12_000
FRAMES = 12  # the last ones of a stack are those that tell


class Pool:
    """`world_size` ranks on loopback."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._workers: list[Any] = []
        self._stacks = tempfile.TemporaryDirectory(prefix="stacks-of-ranks-")

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`job(rank, *args)` on every rank; results in rank order, or what failed as an AssertionError."""
        outcomes = self.outcomes(job, *args, timeout_s=timeout_s)
        failed = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(outcomes) if kind != "ok"]
        # ranks that waited for the failed rank come after it
        assert not failed, "\n".join(sorted(failed, key=lambda text: PEER_TIMEOUT in text))
        return [value for _, value in outcomes]

    def outcomes(self, job: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[tuple[str, Any]]:
        """(kind, value) of every rank: ("ok", result), ("error", traceback) or ("silent", reason)."""
        if not self._workers:
            self._start()
        finished = False
        try:
            for _, pipe in self._workers:
                pipe.send((job, args))
            deadline = time.monotonic() + timeout_s
            outcomes = [self._outcome(rank, deadline, timeout_s) for rank in range(self.world_size)]
            finished = all(kind == "ok" for kind, _ in outcomes)
        finally:
            if not finished:  # also when pytest's own timeout ends the wait
                self.close()
        return outcomes

    def _outcome(self, rank: int, deadline: float, timeout_s: float) -> tuple[str, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(max(deadline - time.monotonic(), 0)):
                return pipe.recv()
        except EOFError:
            process.join(5)
            return "silent", f"ended with exit code {process.exitcode}"
        return "silent", f"no answer in {timeout_s} s; it waits here:\n{self._stack(rank)}"

    def _stack(self, rank: int) -> str:
        """The stacks of all threads of a rank that does not answer."""
        os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        path, deadline = Path(self._stacks.name, str(rank)), time.monotonic() + STACK_TIMEOUT_S
        while END_OF_STACK not in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        return path.read_text()

    def _start(self) -> None:
        context, port = server_context(), free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, port, theirs, Path(self._stacks.name, str(rank)))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @property
    def pids(self) -> set[int]:
        return {process.pid for process, _ in self._workers}

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def server_context() -> Any:
    """Starts processes that are forked from a server which has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


def free_port() -> int:
    """A port that nothing listens on, for a process that is about to.

    It is none of those that the system gives to connections: gloo opens these all the time, so that one which was free
    a moment ago may be the local end of a connection by the time that a store listens on it (EADDRINUSE).
    """
    chance = random.SystemRandom()  # tests set the seed of `random`
    for _ in range(100):
        port = chance.randrange(_FIRST_PORT, _first_port_of_connections())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


def _first_port_of_connections() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    return first if first > 2 * _FIRST_PORT else 65_536


def _serve(rank: int, world_size: int, port: int, pipe: Any, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import warnings

    import torch
    import torch.distributed as dist

    import parallelize
    from parallelize.comm import meshes
    from tests.support import device

    parallelize.build_mesh = meshes.build_mesh = lru_cache(maxsize=None)(_on_device(meshes.build_mesh))
    gc.freeze()  # what the server has imported is never garbage
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.distributed_c10d.default_pg_timeout = timeout  # of every further group
    device.join(rank, world_size, timeout)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            pipe.send(("ok", device.on_cpu(job(rank, *device.placed(args)))))
        except BaseException as error:
            last_frames = traceback.format_exc(limit=-FRAMES)
            pipe.send(("error", f"{type(error).__name__}: {error}\n{last_frames}"))


def _on_device(build_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """`build_mesh` of which jobs ask a mesh of "cpu": one of the device that this rank has."""
    from tests.support import device

    return lambda _device_type, **axes: build_mesh(device.current().type, **axes)
