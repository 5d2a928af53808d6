"""Two computations of one rank that take turns: where one has to wait for a message, the other computes.

    run_in_turns(first, second, worker)   runs both, one at a time; `first` in this thread, `second` in the worker's
    hand_over()                           called where a message was posted and before it is waited for: the other runs
                                          until it hands over in turn, or ends

Only one of the two threads runs at any time, and a turn ends only where the code says so, never after a time. So the order
of everything that a rank does, messages included, is the same on every rank and in every repetition, and state that both
share needs no locks. Outside of `run_in_turns`, `hand_over` reads one number.

Source: the overlap of two microbatches is that of Wang et al., Domino, arXiv:2409.15241 (two parts of a batch) and of
DualPipe, arXiv:2412.19437 (a forward beside a backward); here it is in the transport, so that models stay as they are.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor


class _Lane(threading.local):
    turns: Turns | None = None
    index: int = 0


_LANE = _Lane()
_running = 0  # pairs of computations in this process


class OtherFailedError(Exception):
    """The computation that takes turns with this one has failed, so this one ends as well."""


class Turns:
    """Which of two threads runs. Each has a lock that it waits for while the other runs, and that the other releases."""

    def __init__(self) -> None:
        self._may_run = threading.Lock(), threading.Lock()
        for lock in self._may_run:
            lock.acquire()
        self._ended, self._failed = [False, False], False

    def hand_over(self, index: int) -> None:
        """Let the other run until it hands over or ends. Raises: OtherFailedError."""
        if not self._ended[1 - index]:
            self._may_run[1 - index].release()
            self._may_run[index].acquire()
        if self._failed:
            raise OtherFailedError

    def run(self, index: int, work: Callable[[], None]) -> None:
        """Run one of the two to its end."""
        if index:
            self._may_run[index].acquire()
        outer, _LANE.turns, _LANE.index = (_LANE.turns, _LANE.index), self, index
        try:
            if not self._failed:
                work()
        except BaseException:
            self._failed = True
            raise
        finally:
            _LANE.turns, _LANE.index = outer
            self._ended[index] = True
            self._may_run[1 - index].release()


def run_in_turns(first: Callable[[], None], second: Callable[[], None], worker: Executor) -> None:
    """Run two computations in turns, `first` in this thread.

    Args:
        worker: a thread for `second`. The caller sets what the second needs of the state of this thread, such as autocast.

    Raises: the error of the one that failed; the other got `OtherFailedError` at its next turn.
    """
    global _running
    turns, context = Turns(), contextvars.copy_context()
    _running += 1
    try:
        ended = worker.submit(context.run, turns.run, 1, second)
        try:
            turns.run(0, first)
        except OtherFailedError:
            ended.result()  # the other's error
            raise
        ended.result()
    finally:
        ended.exception()  # waits until it has ended
        _running -= 1


def hand_over() -> None:
    """Let the other computation run, if this thread takes turns with one."""
    if _running and (turns := _LANE.turns) is not None:
        turns.hand_over(_LANE.index)


def takes_turns() -> bool:
    """Whether this thread takes turns with another."""
    return bool(_running) and _LANE.turns is not None
