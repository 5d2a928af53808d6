"""Starts the ranks of this machine through torch's elastic agent, and starts them again after a failure.

OpAgreement, processes and their monitoring are torch's. What is added here: signals of the launcher go to the ranks,
which have as long as the grace period for a save; the number of ranks of the next attempt; and ranks that end with this
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallelize.base.errors import CheckpointError
from parallelize.base.terminal.console import ENVIRONMENT, FINE, MISTAKE, REQUEUE
from parallelize.checkpoint.format import folders
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.head_node import own_address
from parallelize.launch.environment.launcher import SUPERVISOR, Launcher

_LAST_CALL_S = 60  # for nodes that come back after a failure
_BETWEEN_S = 0.5


@dataclass(frozen=True)
class Supervised:
    """What is started.

    Attributes:
        arguments: of `python -m parallelize`, for each rank. restarts: how many more attempts there may be.
        fewer: number of ranks -> the largest number below it for which there is a mesh; None: there is none.
        tell: prints a line.
    """

    config: RunConfig
    launcher: Launcher
    ranks: int
    arguments: Sequence[str]
    restarts: int
    fewer: Callable[[int], int | None]
    tell: Callable[[str], None]


def supervise(started: Supervised) -> int:
    """Run the ranks of this node until they are done, or may not be tried again. Returns: the exit status."""
    with Forwarding() as signals:
        if started.launcher.nodes > 1:
            ended = _attempt(started, started.ranks, started.restarts)
            if ended.status == FAILED:
                started.tell(ended.what)
            return ended.status
        return _attempts(started, signals)


def _attempts(started: Supervised, signals: Forwarding) -> int:
    ranks, left, blamed, step = started.ranks, started.restarts, None, _newest_step(started.config)
    while True:
        ended = _attempt(started, ranks, 0)
        if ended.again and signals.received:
            return _interrupted(started, ended, signals)
        if not ended.again or left == 0:
            if ended.status == FAILED:
                started.tell(f"{ended.what}{'; no restarts are left' if started.restarts else ''}")
            return FAILED if ended.again else ended.status
        left, newest = left - 1, _newest_step(started.config)
        if ended.blamed is not None and ended.blamed == blamed and newest == step and (fewer := started.fewer(ranks)):
            started.tell(f"{ended.what} twice without a checkpoint between: going on with {fewer} of {ranks} ranks")
            ranks = fewer
        blamed, step = ended.blamed, newest
        where = f"step {newest}" if newest else "the beginning"
        started.tell(f"{ended.what}; starting {ranks} ranks again from {where} ({left} more restarts)")
        time.sleep(_BETWEEN_S)


def _interrupted(started: Supervised, ended: Ended, signals: Forwarding) -> int:
    """The status after a signal that ranks did not answer by a save: they had not begun, or a second one came."""
    name = signals.received[-1]
    number = signal.Signals[name].value
    if ended.by == -number:
        started.tell(f"{name}: stopped before the first step; nothing is lost, start it again")
        return REQUEUE
    started.tell(f"{name}: {ended.what}, without a save; the last checkpoint is intact")
    return 128 + number


def _newest_step(config: RunConfig) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    if not config.checkpoints.folder:
        return 0
    try:
        return int(folders.resolve(Path(config.checkpoints.folder), None).name.rpartition("-")[2])
    except (CheckpointError, OSError, ValueError):
        return 0


def _attempt(started: Supervised, ranks: int, restarts: int) -> Ended:
    """One start of the ranks; torch's agent restarts them by itself where there are several nodes."""
    os.environ[SUPERVISOR] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks have said what is wrong
    command = ["-m", "parallelize", *started.arguments]
    try:
        elastic_launch(_launch_config(started, ranks, restarts), sys.executable)(*command)
    except ChildFailedError as error:
        return judge({rank: failure.exitcode for rank, failure in error.failures.items()})
    except RendezvousError as error:  # the head node has ended, or is not there
        return Ended(
            FAILED, True, None, f"the rendezvous at {started.launcher.head} has failed: {str(error).splitlines()[0]}"
        )
    finally:
        wait_for_end(started.config.grace_s)
    return Ended(FINE, False, None, "done")


def _launch_config(started: Supervised, ranks: int, restarts: int) -> LaunchConfig:
    launcher, known = started.launcher, {field.name for field in fields(LaunchConfig)}
    options: dict[str, Any] = {"signals_to_handle": "SIGQUIT", "shutdown_timeout": started.config.grace_s}
    several: dict[str, Any] = {"is_host": launcher.node_rank == 0, "last_call_timeout": _LAST_CALL_S}
    return LaunchConfig(
        min_nodes=1 if restarts else launcher.nodes,
        max_nodes=launcher.nodes,
        nproc_per_node=ranks,
        run_id=f"parallelize-{launcher.port}"
        if launcher.nodes > 1
        else f"parallelize-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{launcher.head}:{launcher.port}" if launcher.nodes > 1 else "127.0.0.1:0",
        rdzv_configs=several if launcher.nodes > 1 else {},
        max_restarts=restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if launcher.nodes == 1 else own_address(launcher.head, launcher.port),
        **{name: value for name, value in options.items() if name in known},
    )


# -- forwarding ------------------------------------------------------------------------------------------------------
# Signals of the launcher, passed on to the ranks that it has started. Linux finds them by /proc, other systems by
# `ps`.


FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_EVERY_S = 0.2


class Forwarding:
    """While it is open, the signals in `FORWARDED` go to the children of this process, also to those that start later.

    Ranks know SIGTERM, SIGUSR1 and SIGINT; SIGHUP is passed on as SIGTERM.

    Attributes:
        received: the names of the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._sent: dict[int, int] = {}  # child to how many signals it has got
        self._numbers: list[int] = []
        self._earlier: dict[int, Any] = {}
        self._done = threading.Event()

    def __enter__(self) -> Forwarding:
        self._earlier = {number: signal.signal(number, self._receive) for number in FORWARDED}
        threading.Thread(target=self._forward, name="signals to ranks", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self.received.append(signal.Signals(number).name)
        self._numbers.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def _forward(self) -> None:
        while not self._done.wait(_EVERY_S):
            if not self._numbers:
                continue
            for child in children():
                for number in self._numbers[self._sent.get(child, 0) :]:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, number)
                self._sent[child] = len(self._numbers)


def children() -> list[int]:
    """The process ids of this process's children."""
    if sys.platform == "linux":
        return list(_children_by_proc())
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False, timeout=20
    ).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, parent in pairs if int(parent) == os.getpid()]


def _children_by_proc() -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == os.getpid() and after_name[0] != "Z":
                    yield int(folder.name)


def wait_for_end(seconds: float) -> None:
    """Wait until all children have ended, at most so long."""
    deadline = time.monotonic() + seconds
    while children() and time.monotonic() < deadline:
        time.sleep(_EVERY_S)


# -- exit statuses ---------------------------------------------------------------------------------------------------
# What the exit statuses of ranks say about a run: done, stopped, a mistake, or a failure after which it may go on.
# Torch-free.


FAILED, PEER_LOST = 1, 4
"""A rank that failed by itself, and one that failed because it lost another."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        status: of the run, if it is not tried again. again: whether another attempt may succeed.
        blamed: the rank that failed first, as far as statuses tell; None where no rank did. what: one line. by: its
            status.
    """

    status: int
    again: bool
    blamed: int | None
    what: str
    by: int = 0


def judge(statuses: Mapping[int, int]) -> Ended:
    """How an attempt ended, from the exit statuses of ranks that did not end with 0. A negative one is a signal's
    number."""
    if not statuses:
        return Ended(FINE, False, None, "done")
    for status in (MISTAKE, ENVIRONMENT, REQUEUE):
        ranks = [rank for rank, ended in statuses.items() if ended == status]
        if ranks:
            what = (
                "stopped by a signal, and saved" if status == REQUEUE else f"rank {ranks[0]} ended with status {status}"
            )
            return Ended(status, False, ranks[0], what)
    # SIGTERM is what the launcher sends to the others; a rank that was killed is to blame before one that lost its peer
    killed = [rank for rank, status in sorted(statuses.items()) if status < 0 and status != -15]
    failed = [rank for rank, status in sorted(statuses.items()) if status not in (PEER_LOST, -15)]
    blamed = (killed or failed or sorted(statuses))[0]
    status = statuses[blamed]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Ended(FAILED, True, blamed, f"rank {blamed} {how}", status)
