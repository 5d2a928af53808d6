"""The figure of a step: samples become spans, and each state of a thread is told apart."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.step_timeline import Sampler, link_spans, spans_of
from parallelize.comm.turns import run_in_turns, yield_turn


def test_neighboring_samples_of_a_state_are_one_span():
    forward, idle = ("", "forward"), ("", "")
    samples = [(0.0, forward), (1.0, forward), (2.0, idle), (3.0, forward), (5.0, idle)]
    assert spans_of(samples) == [(0.0, 2.0, "", "forward"), (3.0, 5.0, "", "forward")]


def test_the_link_is_busy_above_a_tenth_of_its_rate():
    sent = [(0.0, 0), (1.0, 100), (2.0, 109), (3.0, 300)]
    assert [(start, stop) for start, stop, *_ in link_spans(sent, bytes_per_ms=100)] == [(0.0, 1.0), (2.0, 3.0)]


class _Message:
    def wait(self) -> None:
        time.sleep(0.05)


def test_a_thread_whose_turn_it_is_not_has_no_span_and_one_that_waits_for_a_message_has_its_own():
    def forward() -> None:
        yield_turn()
        _compute(0.05)

    def backward() -> None:
        _Message().wait()

    with ThreadPoolExecutor(1, thread_name_prefix="backward") as worker, Sampler(0.002) as sampler:
        run_in_turns(forward, backward, worker)
    first, second = (spans_of(sampler.lanes[name]) for name in ("thread 1", "thread 2"))
    assert {kind for *_, kind in first} == {"forward"} and {kind for *_, kind in second} == {"waits for a message"}


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        threading.get_ident()
