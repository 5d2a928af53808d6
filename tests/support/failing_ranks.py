"""Ranks that fail: processes forked from the server that has imported everything, each with what it printed and how it
ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import free_port, server_context

GROUP_TIMEOUT_S = 30.0


class Ended(NamedTuple):
    """How one rank ended. status: None where it was still there when the time was over. at: the time of the monotonic
    clock."""

    status: int | None
    text: str
    at: float


def run_ranks(
    size: int,
    folder: Path,
    job: Callable[..., None],
    *args: Any,
    timeout_s: float = 40.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Ended]:
    """`job(rank, *args)` as the script of each rank, with uncaught errors as in a script. A rank that is stopped is
    killed, when all others have ended.

    Args:
        timeout_s: seconds after which ranks that are still there are killed.
        group_timeout_s: seconds after which a process group gives up a collective.
    """
    context, port = server_context(), free_port()
    outputs = [folder / f"output-{rank}" for rank in range(size)]
    ranks = [
        context.Process(target=_script, args=(rank, size, port, outputs[rank], group_timeout_s, job, args), daemon=True)
        for rank in range(size)
    ]
    begin = time.monotonic()
    for process in ranks:
        process.start()
    ended: dict[int, float] = {}
    try:
        while len(ended) < size and time.monotonic() < begin + timeout_s:
            ended |= {r: time.monotonic() for r, p in enumerate(ranks) if r not in ended and p.exitcode is not None}
            if len(ended) == size - 1 and any(p.exitcode is None and _is_stopped(p.pid) for p in ranks):
                break
            time.sleep(0.02)
        statuses = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    texts = [path.read_text() if path.exists() else "" for path in outputs]
    return [Ended(statuses[rank], texts[rank], ended.get(rank, begin + timeout_s)) for rank in range(size)]


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has just ended
        return False


def _script(
    rank: int, size: int, port: int, output: Path, group_timeout_s: float, job: Callable[..., None], args: tuple
) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import warnings

    import torch
    import torch.distributed as dist

    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=group_timeout_s)
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    status = 0
    try:
        job(rank, *args)
    except BaseException as error:  # multiprocessing has a handler of its own, a script has this one
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
