"""Starts the ranks of this machine through torch's elastic agent, and starts them again after a failure.

Rendezvous, processes and their monitoring are torch's. What is added here: signals of the launcher go to the ranks, which have as
long as the grace period for a save; the number of ranks of the next attempt; and ranks that end with this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallelize.base.errors import CheckpointError
from parallelize.base.terminal.console import FINE, REQUEUE
from parallelize.checkpoint.format import folders
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.head_node import own_address
from parallelize.launch.environment.launcher import SUPERVISOR, Launcher
from parallelize.launch.start.exit_statuses import FAILED, Ended, judge
from parallelize.launch.start.forwarding import Forwarding, wait_for_end

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
