"""Cells in worker processes: a cell that hangs or ends its process is one crashed cell, and the others go on."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from tests.matrix.cells import CRASHED, Verdict, run_cell
from tests.matrix.verdicts import Cell
from tests.support.processes import server_context

Job = Callable[[str, str, str], Verdict]
TIMEOUT_S = 120.0
_START_S = 120.0  # what a worker may take to import everything
_CELLS = 400  # of one worker, before a fresh one takes its place
_FRAMES = 1500  # of a trace, the last characters


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    verdict: Verdict
    seconds: float


@dataclass
class _Worker:
    process: Any
    pipe: Any
    cells: deque[Cell] = field(default_factory=deque)
    done: int = 0
    deadline: float = 0.0


def run_cells(
    cells: list[Cell],
    workers: int = 2,
    seconds: float | None = None,
    timeout_s: float = TIMEOUT_S,
    job: Job = run_cell,
) -> Iterator[Outcome]:
    """Every cell, those of a feature and kind in one worker, which makes their reference once.

    Args:
        cells: to run. workers: how many processes.
        seconds: no cell begins after so many.
        timeout_s: of one cell. job: what runs a cell; a function of a module.
    """
    groups: dict[tuple[str, str], deque[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell[:2], deque()).append(cell)
    waiting, running = deque(groups.values()), []
    stop = None if seconds is None else time.monotonic() + seconds
    try:
        while waiting or running:
            if stop is not None and time.monotonic() > stop:
                waiting.clear()
                for worker in running:
                    worker.cells = deque(list(worker.cells)[:1])
            while waiting and len(running) < workers:
                running.append(_begin(_start(job), waiting.popleft(), timeout_s + _START_S))
            soonest = min(worker.deadline for worker in running)
            ready = wait([worker.pipe for worker in running], max(soonest - time.monotonic(), 0) + 0.01)
            for worker in list(running):
                if worker.pipe in ready or time.monotonic() > worker.deadline:
                    yield _outcome(worker, timeout_s)
                    _go_on(worker, running, waiting, timeout_s)
    finally:
        for worker in running:
            _end(worker)


def _outcome(worker: _Worker, timeout_s: float) -> Outcome:
    """What a worker has sent, or why it has sent nothing."""
    cell = worker.cells.popleft()
    if not worker.pipe.poll():
        _end(worker)
        return Outcome(cell, Verdict(CRASHED, f"no verdict in {timeout_s:g} s"), timeout_s)
    try:
        verdict, seconds = worker.pipe.recv()
    except EOFError:
        _end(worker)
        return Outcome(cell, Verdict(CRASHED, f"its process ended with exit code {worker.process.exitcode}"), 0.0)
    worker.done += 1
    return Outcome(cell, verdict, seconds)


def _go_on(worker: _Worker, running: list[_Worker], waiting: deque[deque[Cell]], timeout_s: float) -> None:
    """The next cell of the worker, or of a fresh one where this one has ended."""
    ended = not worker.process.is_alive() or worker.done >= _CELLS
    if ended:
        _end(worker)
        running.remove(worker)
        if worker.cells:
            waiting.appendleft(worker.cells)
    elif worker.cells:
        _begin(worker, worker.cells, timeout_s)
    elif waiting:
        _begin(worker, waiting.popleft(), timeout_s)
    else:
        _end(worker)
        running.remove(worker)


def _start(job: Job) -> _Worker:
    context = server_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _begin(worker: _Worker, cells: deque[Cell], allowed_s: float) -> _Worker:
    worker.cells, worker.deadline = cells, time.monotonic() + allowed_s
    with suppress(OSError):  # it has just ended, which the next `recv` says
        worker.pipe.send(cells[0])
    return worker


def _end(worker: _Worker) -> None:
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _serve(pipe: Any, job: Job) -> None:
    """A worker: a cell in, its verdict and seconds out."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PARALLELIZE_TRACE="off")
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        began = time.perf_counter()
        pipe.send((_verdict(job, cell), time.perf_counter() - began))


def _verdict(job: Job, cell: Cell) -> Verdict:
    """The verdict; a row that fails alone too is a crash of its cells."""
    try:
        verdict = job(*cell)
    except Exception as error:
        return Verdict(CRASHED, f"{type(error).__name__} outside of the ranks: {str(error)[:160]}")
    return Verdict(verdict.word, verdict.detail, verdict.trace[-_FRAMES:])
