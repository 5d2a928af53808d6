"""Two computations of one rank that take turns: where one has to wait for a message, the other computes.

    run_in_turns(first, second, worker)   runs both, one at a time; `first` in this thread, `second` in the worker's
    hand_over()                           called where a message was posted and before it is waited for: the other runs
                                          until it hands over in turn, or ends

Only one of the two threads runs at any time, and a turn ends only where the code says so, never after a time. So the
order of everything that a rank does, messages included, is the same on every rank and in every repetition, and state
that both share needs no locks. That holds as long as every rank of a group hands over at the same calls: whether a call
hands over may depend on nothing that differs between ranks. Outside of `run_in_turns`, `yield_turn` reads one number.

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
running = 0
"""Pairs of computations in this process that take turns."""


class OtherFailedError(BaseException):
    """The computation that takes turns with this one has failed, so this one ends as well.

    Not an `Exception`, so that no handler in a model catches it, or puts its own error in its place.
    """


class Turns:
    """Whose turn it is.

    Attributes:
        error: of the computation that failed first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._ended = 0, [False, False]
        self.error: BaseException | None = None

    def yield_turn(self, index: int) -> None:
        """Let the other run until it hands over or ends. Raises: OtherFailedError."""
        with self._changed:
            if not self._ended[1 - index]:
                self._turn = 1 - index
                self._changed.notify()
                self._changed.wait_for(lambda: self._turn == index)
        if self.error is not None:
            raise OtherFailedError

    def run(self, index: int, work: Callable[[], None]) -> None:
        """Run one of the two to its end."""
        outer, _LANE.turns, _LANE.index = (_LANE.turns, _LANE.index), self, index
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == index)
            if self.error is None:
                work()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            _LANE.turns, _LANE.index = outer
            self.end(index)

    def end(self, index: int) -> None:
        """The other has all turns from now on."""
        with self._changed:
            self._ended[index], self._turn = True, 1 - index
            self._changed.notify()


def run_in_turns(first: Callable[[], None], second: Callable[[], None], worker: Executor) -> None:
    """Run two computations in turns, `first` in this thread.

    Args:
        worker: a thread for `second`. The caller sets what the second needs of the state of this thread, such as
            autocast.

    Raises: the error of the one that failed first; the other got `OtherFailedError` at its next turn.
    """
    global running
    turns = Turns()
    ended = worker.submit(contextvars.copy_context().run, turns.run, 1, second)
    running += 1
    try:
        try:
            turns.run(0, first)
        except OtherFailedError:
            pass
        finally:
            turns.end(0)  # also where this thread was interrupted before its turn
            ended.exception()  # waits until it has ended
    finally:
        running -= 1
    if turns.error is not None:
        raise turns.error


def yield_turn() -> None:
    """Let the other computation run, if this thread takes turns with one."""
    if running and (turns := _LANE.turns) is not None:
        turns.yield_turn(_LANE.index)


def takes_turns() -> bool:
    """Whether this thread takes turns with another."""
    return bool(running) and _LANE.turns is not None


def is_second() -> bool:
    """Whether this thread takes turns with another, which began before it."""
    return takes_turns() and _LANE.index == 1
