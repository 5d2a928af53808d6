"""Two computations that take turns: their order, their errors, and nothing outside of a pair."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from parallelize.comm.turns import OtherFailedError, run_in_turns, takes_turns, yield_turn

NAME: ContextVar[str] = ContextVar("NAME")


@pytest.fixture
def worker():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def writer(log: list[str], name: str, turns: int):
    def write() -> None:
        for turn in range(turns):
            log.append(f"{name}{turn}")
            yield_turn()
        log.append(f"{name} ends")

    return write


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 4), (4, 0), (0, 2)])
def test_a_turn_ends_where_one_hands_over_or_ends(worker, first, second):
    logs: list[list[str]] = []
    for _ in range(3):
        log: list[str] = []
        run_in_turns(writer(log, "a", first), writer(log, "b", second), worker)
        logs.append(log)
    assert logs[0] == logs[1] == logs[2]
    a, b = ([*(f"{name}{n}" for n in range(count)), f"{name} ends"] for name, count in (("a", first), ("b", second)))
    together = min(len(a), len(b))
    pairs = [entry for pair in zip(a, b, strict=False) for entry in pair]
    assert logs[0] == pairs + a[together:] + b[together:]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_ends_the_other_at_its_next_turn(worker, failing):
    ended = []

    def fails() -> None:
        yield_turn()
        raise ValueError("bang")

    def runs() -> None:
        try:
            for _ in range(5):
                yield_turn()
        except OtherFailedError:
            ended.append(True)
            raise

    with pytest.raises(ValueError, match="bang"):
        run_in_turns(*((fails, runs) if failing == 0 else (runs, fails)), worker)
    assert ended == [True]
    run_in_turns(lambda: None, lambda: None, worker)  # nothing is left of the failure
    assert not takes_turns()


def test_a_handler_of_the_other_hides_no_error(worker):
    def fails() -> None:
        yield_turn()
        raise ValueError("the first error")

    def wraps() -> None:
        try:
            for _ in range(3):
                yield_turn()
        except Exception:
            raise RuntimeError("another one") from None

    with pytest.raises(ValueError, match="the first error"):
        run_in_turns(wraps, fails, worker)


def test_an_interrupt_ends_both(worker):
    ended = []

    def interrupted() -> None:
        yield_turn()
        raise KeyboardInterrupt

    def runs() -> None:
        try:
            while True:
                yield_turn()
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_in_turns(interrupted, runs, worker)
    assert ended == [True]


def test_a_worker_that_cannot_start_leaves_nothing(worker):
    worker.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        run_in_turns(lambda: None, lambda: None, worker)
    assert not takes_turns()


def test_the_second_has_the_context_of_the_first(worker):
    names = []
    NAME.set("of the caller")
    run_in_turns(lambda: None, lambda: names.append(NAME.get()), worker)
    assert names == ["of the caller"]


def test_outside_of_a_pair_nothing_is_handed_over():
    assert not takes_turns()
    yield_turn()
