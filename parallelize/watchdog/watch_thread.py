"""The watch's thread: heartbeats, events of other ranks, and the end of this process when the run cannot go on."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from parallelize.base.errors import Problem
from parallelize.watchdog.call_gate import CallGate
from parallelize.watchdog.call_log import CallLog
from parallelize.watchdog.rank_state import StandingThread, call_data, identity, process_state, rank_state, waiting_call
from parallelize.watchdog.store_channel import LOST, StoreChannel
from parallelize.watchdog.verdict import State, call_text, crash_file, judge, remove_if_empty, write_state

STOPPED_STATUS = 70
"""The exit status of a rank that is ended by its watch (EX_SOFTWARE of sysexits.h)."""
COLLECT_S = 2.0
"""How long a rank that ends waits for the states of the others."""
GRACE_S = 0.5
"""What the main thread gets to raise an error of its own, when another rank has failed."""
_LEFT_S = 1.0
"""How long a rank waits for one that has left the loop before that is an error."""
_GONE_S = 1.0
_PRINT_S = 1.0
_FAILING_S = 60.0
"""What a failing rank's own handlers get, before its process is ended."""
_PRINTS_ALL = 8
"""Ranks up to which each prints the verdict; of more, the first of each node."""


@dataclass
class WatchedRank:
    """What the thread and the entry share.

    Attributes:
        error: this rank's own error, as it is in the state. handled: one that this rank is about to exchange with the
            others.
        crashes: where the interpreter writes stacks by itself.
        run: the name of the run, "" until it is needed. ending: is locked by whoever ends the process.
    """

    channel: StoreChannel
    log: CallLog
    gate: CallGate
    folder: Path
    timeout_s: float
    error: dict[str, Any] | None = None
    handled: dict[str, Any] | None = None
    crashes: TextIO | None = None
    run: str = ""
    ending: threading.Lock = field(default_factory=threading.Lock)


class WatchThread(threading.Thread):
    """One thread for the whole run. Nothing in it waits for longer than the store's answer."""

    def __init__(self, watched: WatchedRank):
        super().__init__(name="parallelize-watch", daemon=True)
        self.watched = watched
        self.interval_s = min(max(watched.timeout_s / 20, 0.05), 0.5)
        self.standing = StandingThread(watched.log)
        self.left: dict[int, dict[str, Any]] = {}
        self._stop_asked = threading.Event()
        self._identity = identity()
        self._gone_since: dict[int, float] = {}
        self._failed_at: float | None = None
        self._armed_at = float("-inf")
        self._troubled: dict[int, dict[str, Any]] = {}  # ranks that have failed and wait to tell so in a collective
        self._announced: dict[str, Any] | None = None

    def wait_for_the_others(self, wait_s: float) -> None:
        """In the process that may have the store: until every rank has left, or for a while."""
        channel, deadline = self.watched.channel, time.monotonic() + wait_s
        while channel.rank == 0 and len(self.left) < channel.size and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        """End the thread, from another one."""
        self._stop_asked.set()
        self.join(5.0)

    def beat(self) -> None:
        """Tell the other ranks that this one lives, and what it called last."""
        last = self.watched.log.last
        call = None if last is None else call_text(last[1].as_data())
        self.watched.channel.set(
            f"hb/{self.watched.channel.rank}", self._identity | {"time": time.time(), "call": call}
        )

    def run(self) -> None:
        while not self._stop_asked.wait(self.interval_s):
            try:
                self.tick()
            except LOST as error:
                if not self._goes_on_without_store(error):
                    return
            except Exception:
                print(f"parallelize watch has ended:\n{traceback.format_exc()}", file=sys.stderr)
                return

    def tick(self) -> None:
        """One iteration of the thread: a heartbeat, the events of other ranks, and whether anything stands still."""
        watched = self.watched
        self._arm()
        self.standing.sample()
        self.beat()
        successor = self._successor()
        events, beat = watched.channel.read(successor)
        for event in events:
            self._handle(event)
        watched.gate.answer(watched.log.groups)
        if watched.error is not None:
            self._end_slow_failure()
            return
        self._watch_successor(successor, beat)
        self._watch_self()

    def _arm(self) -> None:
        """Let the interpreter write all stacks, without its lock, where this thread does not come here again in
        time."""
        now = time.monotonic()
        if self.watched.crashes is not None and now > self._armed_at + self.watched.timeout_s / 4:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.watched.timeout_s, file=self.watched.crashes)

    def _successor(self) -> int:
        """The next rank that has not left; each rank looks after one, so that a gone rank is seen by some rank."""
        rank, size = self.watched.channel.rank, self.watched.channel.size
        other_ranks = [(rank + step) % size for step in range(1, size)]
        return next((other for other in other_ranks if other not in self.left), other_ranks[0])

    def _handle(self, event: dict[str, Any]) -> None:
        if event["kind"] == "question":
            self.watched.gate.ask(event)
        elif event["kind"] == "left":
            self.left[event["rank"]] = event["state"]
        elif event["kind"] == "troubled":
            self._troubled[event["rank"]] = event["state"]
        elif event["kind"] == "recovered":
            self._troubled.pop(event["rank"], None)
        elif event["kind"] in ("error", "alarm") and (
            event["kind"] == "alarm" or event["rank"] != self.watched.channel.rank
        ):
            self.end_run(GRACE_S if event["kind"] == "error" else 0.0)

    def _watch_successor(self, rank: int, beat: Any) -> None:
        """A process of this machine that is gone. One of another machine is missed by those who wait for it."""
        if rank in self.left or process_state(beat, self._identity["machine"]) != "gone":
            self._gone_since.pop(rank, None)
        elif time.monotonic() - self._gone_since.setdefault(rank, time.monotonic()) > _GONE_S:
            self._alarm()

    def _watch_self(self) -> None:
        if self.watched.channel.rank in self.left:
            return
        call = waiting_call(self.watched.log, self.standing)
        if call is None and not self.standing.waits and self._announced is None:
            return
        stands_s = self.standing.stands_s
        handled = self.watched.handled
        if handled is not self._announced and (handled is None or stands_s > _LEFT_S):
            self._announced = handled
            self.watched.channel.post("troubled" if handled else "recovered", state=self._state())
        if stands_s > self.watched.timeout_s or (stands_s > _LEFT_S and self._waits_in_vain(call)):
            self._alarm()

    def _waits_in_vain(self, waiting: Any) -> bool:
        """Whether this rank waits for one that has left, or that has failed before it came here."""
        if waiting is None:
            return False
        group, call = waiting
        states = self._troubled | self.left
        for rank in set(group.ranks) & set(states):
            group_of_rank = states[rank]["groups"].get(group.key, {"collectives": 0})
            if (call.peer is None and group_of_rank["collectives"] <= call.number) or call.peer == rank:
                return True
        return False

    def _alarm(self) -> None:
        self.watched.channel.post("alarm")
        self.end_run(0.0)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end_run(self, grace_s: float) -> None:
        """End this process with the verdict, unless this rank's own error does so within `grace_s`."""
        deadline = time.monotonic() + grace_s
        while self.watched.error is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with self.watched.ending:
            if self.watched.error is not None and not self.watched.error.get("follows"):
                return
            state = self._state()
            states = self._collected(state)
            self._report(state, judge(states, self.watched.channel.size, state["absent"]))
            self.wait_for_readers([rank for rank, other in states.items() if other["status"] in ("waits", "runs")])
            self._exit(1 if state["status"] == "failed" else STOPPED_STATUS)

    def write_early(self) -> None:
        """Write this rank's file before all is known: where a process has died, its launcher may end this one at any
        moment."""
        state = self._state()
        absent: dict[int, str] = {}
        with suppress(*LOST):
            self._collect({state["rank"]: state}, absent, late=False)
        with suppress(OSError):
            write_state(self.watched.folder, state | {"run": self.run_name(), "absent": absent, "left": {}})

    def _state(self) -> State:
        watched = self.watched
        state = rank_state(watched.log, self.standing, watched.channel.rank, watched.channel.size)
        if watched.gate.waiting is not None:
            group, call = watched.gate.waiting
            state |= {"status": "waits", "waiting": {"group": group.key, "call": call_data(watched.log, call)}}
        error = watched.handled or watched.error
        if error is not None and error["follows"]:  # it came out of the last call
            last = watched.log.last
            waiting = None if last is None else {"group": last[0].key, "call": call_data(watched.log, last[1])}
            state |= {"status": "waits", "waiting": waiting, "follows": error["text"]}
            state |= {key: error[key] for key in ("stack", "place")}
        elif error is not None:
            state |= {"status": "failed", "error": error, "stack": error["stack"]}
        return state

    def _collected(self, own: State) -> dict[int, State]:
        """The states of all ranks that answer; what is known of the others becomes `absent` of this rank's."""
        channel = self.watched.channel
        states: dict[int, State] = {own["rank"]: own}
        absent: dict[int, str] = {}
        try:
            channel.set(f"state/{channel.rank}", own)
            deadline = time.monotonic() + COLLECT_S
            while len(states) + len(absent) < channel.size:
                late = time.monotonic() > deadline
                self._collect(states, absent, late)
                if late:
                    break
                time.sleep(0.05)
        except LOST as error:
            first = "rank 0, whose process has the store of all ranks" if channel.rank else "the store of all ranks"
            absent = {rank: absent.get(rank, "unknown") for rank in range(channel.size) if rank not in states}
            absent[0] = f"{first}, does not answer: {str(error).splitlines()[0][:100]}"
        with suppress(*LOST):
            channel.set(f"done/{channel.rank}", True)
        own |= {"absent": absent, "left": {rank: states[rank] for rank in states if rank in self.left}}
        return states

    def _collect(self, states: dict[int, State], absent: dict[int, str], late: bool) -> None:
        channel = self.watched.channel
        for rank in range(channel.size):
            if rank in states or rank in absent:
                continue
            state = channel.get(f"state/{rank}") or self.left.get(rank)
            if state is not None:
                states[rank] = state
                continue
            beat = channel.get(f"hb/{rank}") or {}
            known = process_state(beat, self._identity["machine"])
            if late or known in ("gone", "stopped"):
                absent[rank] = _absent_text(beat, known)

    def _report(self, state: State, verdict: Problem) -> None:
        watched = self.watched
        lines = [*state["stack"]] if state["status"] == "failed" else []
        lines += [f"rank {state['rank']} is ended by its watch: {verdict}"]
        if watched.channel.size > _PRINTS_ALL and os.environ.get("LOCAL_RANK", str(state["rank"])) != "0":
            lines = [f"rank {state['rank']} is ended by its watch: {verdict.slug}: {verdict.what}"]
        with suppress(OSError):
            path = write_state(watched.folder, state | {"run": self.run_name(), "verdict": str(verdict)})
            lines.append(f"  files   {path.parent}: `parallelize diagnose {path.parent}` reads those of all ranks")
        remove_if_empty(crash_file(watched.folder, watched.channel.rank))
        self._say("\n".join(lines))

    def wait_for_readers(self, ranks: Iterable[int]) -> None:
        """Live until these ranks have read what they need, or for a while: this process may have the store, and a
        launcher ends all others when the first one ends."""
        channel, deadline = self.watched.channel, time.monotonic() + COLLECT_S + GRACE_S
        other_keys = [f"done/{rank}" for rank in ranks if rank != channel.rank]
        with suppress(*LOST):
            while channel.get_all(other_keys) is None and time.monotonic() < deadline:
                time.sleep(0.02)

    def run_name(self) -> str:
        """The name of this run, which the first rank that asks for it gives; the process id and time where the store is
        lost."""
        if not self.watched.run:
            name = f"{os.getpid()}-{time.time():.0f}"
            with suppress(*LOST):
                name = self.watched.channel.first_of("run", name)
            self.watched.run = name
        return self.watched.run

    def _end_slow_failure(self) -> None:
        """A failed rank whose own handlers wait, for example for other ranks, is ended too."""
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > _FAILING_S and not self.watched.error.get("follows"):  # type: ignore[union-attr]
            self._say(f"rank {self.watched.channel.rank} is ended {_FAILING_S:.0f} s after its own error")
            self._exit(1)

    def _goes_on_without_store(self, error: Exception) -> bool:
        """Whether to go on where the store is lost: until this rank's thread waits for others, which then cannot be
        asked."""
        self.watched.gate.closed = True
        if 0 in self.left or self.watched.error is not None:
            return False
        self.standing.sample()
        if self.standing.waits and self.standing.stands_s > _GONE_S:
            self.end_run(0.0)
        return True

    def _say(self, text: str) -> None:
        """Print in a thread of its own, because the main thread may stand still with the lock of a stream."""
        printer = threading.Thread(target=_print, args=(text,), daemon=True)
        printer.start()
        printer.join(_PRINT_S)

    def _exit(self, status: int) -> None:
        """End the process from this thread, because the main thread may stand in C++ code that nothing interrupts."""
        os._exit(status)


def _print(text: str) -> None:
    for stream, line in ((sys.stdout, ""), (sys.stderr, f"{text}\n")):
        with suppress(Exception):
            stream.write(line)
            stream.flush()


def _absent_text(beat: dict[str, Any], known: str) -> str:
    """What is known of a rank that does not answer, from its last heartbeat."""
    if not beat:
        return "it never opened a watch"
    process = f"process {beat['pid']} on {beat['host']}"
    silent_s = time.time() - beat.get("time", time.time())
    text = {
        "gone": f"{process} has ended without a word",
        "stopped": f"{process} is stopped by a signal (SIGSTOP)",
        "running": f"{process} has given no sign for {silent_s:.1f} s; it may hold Python's lock",
    }.get(known, f"{process} has given no sign for {silent_s:.1f} s")
    call = beat.get("call")
    return f"{text}; its last call: {call}" if call else f"{text}; it has called no collective"
