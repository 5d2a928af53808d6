"""What one training step computes, waits for, and sends, as a figure: PyTorch's styles above, microbatches beside each
other below.

    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.step_timeline --hidden 512 --svg step.svg

The steps are those of `benchmarks.microbatch_step`. A thread looks every few milliseconds at the stacks of the threads
that compute, and reads how many bytes the network interface has sent. So a span is as exact as the samples are close;
the samples cost the step about 1%.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from benchmarks import svg
from benchmarks.microbatch_step import Steps, check
from benchmarks.timeline import Span, sent_bytes
from benchmarks.timing import join
from parallelize import destroy_groups
from parallelize.comm.turns import Turns, run_in_turns

_WAITING = {"wait", "_wait", "wait_tensor", "finish", "drain"}
_BUSY_SHARE = 0.1  # of the link's rate: acknowledgments alone are less
State = tuple[str, str]  # label and kind of a span; empty: nothing to draw


class Sampler(threading.Thread):
    """Samples what each thread does, from `with` to its end.

    Attributes:
        lanes: name of a lane -> [(time in ms, state)]. sent: [(time in ms, bytes sent so far)].
    """

    def __init__(self, period_s: float):
        super().__init__(daemon=True)
        self.period_s, self.main = period_s, threading.get_ident()
        self.lanes: dict[str, list[tuple[float, State]]] = {}
        self.sent: list[tuple[float, int]] = []
        self._ended = threading.Event()

    def __enter__(self) -> Sampler:
        self.began = time.perf_counter()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(self.period_s):
            at = (time.perf_counter() - self.began) * 1e3
            frames = sys._current_frames()
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in frames.items():
                if ident == self.main:
                    self.lanes.setdefault("thread 1", []).append((at, state_of(frame)))
                elif threads.get(ident, "").startswith("backward"):
                    self.lanes.setdefault("thread 2", []).append((at, state_of(frame)))
            self.sent.append((at, sent_bytes() or 0))


def state_of(frame: FrameType | None) -> State:
    """What a thread does, by its stack: nothing while the other has its turn, a wait, a forward, a backward."""
    stack = list(_callers(frame))
    if not stack or stack[0].f_code.co_filename == threading.__file__:
        turns = (Turns.yield_turn.__code__, run_in_turns.__code__)
        waits_for_its_turn = any(caller.f_code in turns for caller in stack)
        return ("", "") if waits_for_its_turn or not _computes(stack) else ("", "waits for a message")
    if not _computes(stack):
        return ("", "")
    if any(caller.f_code.co_name in _WAITING for caller in stack[:4]):
        return ("", "waits for a message")
    backward = any(caller.f_code.co_name in ("backward", "_engine_run_backward") for caller in stack)
    return ("", "backward" if backward else "forward")


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _computes(stack: list[FrameType]) -> bool:
    """Whether this is inside a step, rather than in a thread that has no work, or in the barrier before it."""
    return any(caller.f_code.co_name in ("forward", "backward", "_call_impl") for caller in stack)


def spans_of(samples: list[tuple[float, State]]) -> list[Span]:
    """Neighboring samples of one state are one span."""
    spans: list[Span] = []
    for (at, (label, kind)), (until, _) in pairwise(samples):
        if not kind:
            continue
        if spans and spans[-1][1] == at and spans[-1][3] == kind:
            spans[-1] = (spans[-1][0], until, label, kind)
        else:
            spans.append((at, until, label, kind))
    return spans


def link_spans(sent: list[tuple[float, int]], bytes_per_ms: float) -> list[Span]:
    """When the interface sent more than a tenth of what the link can."""
    rates = [
        (at, ("", "bytes on the link" if (later - bytes_sent) > _BUSY_SHARE * bytes_per_ms * (until - at) else ""))
        for (at, bytes_sent), (until, later) in pairwise(sent)
    ]
    return spans_of([*rates, (sent[-1][0], ("", ""))]) if sent else []


def record(step: Callable[[], float], period_s: float) -> Sampler:
    dist.barrier()
    with Sampler(period_s) as sampler:
        step()
    return sampler


def rows_of(title: str, sampler: Sampler, bytes_per_ms: float) -> list[tuple[str, list[Span]]]:
    rows = [(f"{title}, {name}", spans_of(samples)) for name, samples in sorted(sampler.lanes.items())]
    return [*((name, spans) for name, spans in rows if spans), ("    link", link_spans(sampler.sent, bytes_per_ms))]


def shares(rows: list[tuple[str, list[Span]]]) -> dict[str, float]:
    """Milliseconds of each kind, over all lanes."""
    total: dict[str, float] = {}
    for _, spans in rows:
        for start, stop, _, kind in spans:
            total[kind] = total.get(kind, 0.0) + stop - start
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--flat", action="store_true", help="blocks without modules inside")
    parser.add_argument("--rate", type=float, default=1e9, help="of the link, bits a second")
    parser.add_argument("--period", type=float, default=2e-3, help="seconds between samples")
    parser.add_argument("--svg", type=Path, default=Path("step.svg"))
    options = parser.parse_args()
    options.dict = False
    join()
    made = Steps(options, options.hidden)
    steps: dict[str, Any] = {"PyTorch": made.stock(), "sync": made.ours("sync", made.mesh, {})}
    steps["paired"] = made.ours("paired", made.mesh, {"overlap": "auto", "overlap_microbatches": True})
    check({"stock": steps["PyTorch"], **{name: steps[name] for name in ("sync", "paired")}}, made.models)
    rows: list[tuple[str, list[Span]]] = []
    for title, name in (("PyTorch", "PyTorch"), ("in pairs", "paired")):
        steps[name]()
        step_rows = rows_of(title, record(steps[name], options.period), options.rate / 8e3)
        rows += step_rows
        if dist.get_rank() == 0:
            end = max(stop for _, spans in step_rows for _, stop, _, _ in spans)
            parts = ", ".join(f"{kind} {ms:.0f}" for kind, ms in shares(step_rows).items())
            print(f"{title}: {end:.0f} ms ({parts})", flush=True)
    if dist.get_rank() == 0:
        about = f"{options.microbatches} microbatches of {options.length} tokens, hidden {options.hidden}"
        svg.lanes(options.svg, f"A step of {about}, rank 0 of {dist.get_world_size()}", rows)
        print(f"written: {options.svg}")
    destroy_groups()


if __name__ == "__main__":
    main()
