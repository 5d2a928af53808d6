"""What this rank is doing, as plain data: where its thread stands and since when, its last collectives, its error."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from parallelize.base.package import FOLDER
from parallelize.base.user_code import INSTALLED, PYTHON, TORCH, is_user_code
from parallelize.state.records import resolution_of
from parallelize.watchdog.call_log import CallLog, CollectiveCall, GroupCalls

_COMMUNICATES = (
    f"{FOLDER}/comm/",
    f"{FOLDER}/watchdog/",
    f"{FOLDER}/base/torch_private/torch_groups.py",
    f"{TORCH}/distributed/",
)
_WORKS_ALONE = (f"{TORCH}/distributed/checkpoint/", f"{TORCH}/distributed/fsdp/")
_COMPUTES = (f"{TORCH}/distributed/tensor/", f"{TORCH}/distributed/pipelining/")  # beside what it communicates
_DISPATCHES = f"{TORCH}/_ops.py"
_PASSED_ON = "torch/nn/modules/module.py"
"""A file whose lines only call the next one."""
_PATCHES, _CALLS = f"{FOLDER}/watchdog/call_patches.py", ("call", "wait")
"""The functions of that file that run a call, or wait for one."""
_RECENT_CALLS = 12
_STACK_LINES = 24


class StandingThread:
    """Since when the thread that calls collectives has not moved.

    In a recorded call, whatever runs inside of it, and in other code of communication, which may wait in a loop that
    asks a store, sleeps and asks again, what stands is the stack up to the line that called it; of any other code it is
    the whole stack.

    Attributes:
        since: of the monotonic clock. waits: whether its innermost Python code is that of communication. in_call:
            whether it is in the last recorded call, or waits for it.
    """

    def __init__(self, log: CallLog):
        self.log = log
        self.since = time.monotonic()
        self.waits = self.in_call = False
        self._progress: Any = None

    def frame(self) -> Any:
        """Its innermost frame, None where it has ended."""
        return sys._current_frames().get(self.log.thread)

    def sample(self) -> None:
        """Compare its stack with that of the last sample. Cost: about 10 us."""
        frame = self.frame()
        call, caller = _recorded_call(frame), _calling(frame)
        file = "" if caller is None else caller.f_code.co_filename
        self.in_call = call is not None
        self.waits = self.in_call or _communicates(file)
        if self.in_call:
            frame = call.f_back
        elif self.waits and not file.startswith(_COMPUTES):
            frame = _frame_outside(caller)
        progress = (self.log.count, _positions(frame))
        if progress != self._progress:
            self._progress, self.since = progress, time.monotonic()

    @property
    def stands_s(self) -> float:
        return time.monotonic() - self.since


def _recorded_call(frame: Any) -> Any:
    """The frame of the call of a process group, or of the wait for one, in which a thread is; None outside of them."""
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_code.co_filename == _PATCHES:
            return frame
        frame = frame.f_back
    return None


def _calling(frame: Any) -> Any:
    """The innermost frame that is not of Python itself, such as a lock or a parser, nor of what dispatches an
    operation."""
    while frame is not None and (frame.f_code.co_filename == _DISPATCHES or _is_of_python(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


def _frame_outside(frame: Any) -> Any:
    """The innermost frame that is not of communication, nor of Python itself."""
    while frame is not None and (_communicates(frame.f_code.co_filename) or _is_of_python(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


def _communicates(file: str) -> bool:
    return file.startswith(_COMMUNICATES) and not file.startswith(_WORKS_ALONE)


def _is_of_python(file: str) -> bool:
    return file.startswith((PYTHON, "<")) and not file.startswith(INSTALLED)


def _positions(frame: Any) -> list[tuple[int, int]]:
    """Where each function of a stack is."""
    positions = []
    while frame is not None:
        positions.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return positions


def stack_lines(frame: Any) -> list[str]:
    """The Python stack of a frame, innermost line last."""
    entries = traceback.extract_stack(frame) if frame is not None else []
    return [line_of(entry) for entry in entries if not entry.filename.endswith(_PASSED_ON)][-_STACK_LINES:]


def line_of(summary: traceback.FrameSummary) -> str:
    file = summary.filename.removeprefix(f"{Path(TORCH).parent}/").removeprefix(f"{Path(FOLDER).parent}/")
    return f"{file}:{summary.lineno} in {summary.name}: {(summary.line or '').strip()}"


def user_line(frame: Any) -> str:
    """The innermost line of a stack in user code."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return line_of(traceback.extract_stack(frame)[-1])
        frame = frame.f_back
    return ""


def rank_state(log: CallLog, thread: StandingThread, rank: int, size: int) -> dict[str, Any]:
    """The state of this rank (see `verdict`), without an error."""
    frame = thread.frame()
    last = waiting_call(log, thread)
    return {
        **identity(),
        "rank": rank,
        "size": size,
        "time": time.time(),
        "status": "waits" if last is not None or thread.waits else "runs",
        "waits_s": round(thread.stands_s, 3),
        "place": user_line(frame),
        "stack": stack_lines(frame),
        "waiting": None if last is None else {"group": last[0].key, "call": call_data(log, last[1])},
        "total": log.count,
        "groups": {key: _group_data(log, group) for key, group in list(log.groups.items())},
    }


def waiting_call(log: CallLog, thread: StandingThread) -> tuple[GroupCalls, CollectiveCall] | None:
    """The call in which this rank waits: one that a device has not finished, else the last one of a thread that stands
    in it."""
    for group in list(log.groups.values()):
        if group.is_pending and (recent := group.recent):
            return group, recent[-1]
    return log.last if thread.in_call else None


def call_data(log: CallLog, call: CollectiveCall) -> dict[str, Any]:
    """A call as plain data, with the rule of its module."""
    return call.as_data() | {"rule": rule_of(log.names.roots, call.place.module)}


def _group_data(log: CallLog, group: GroupCalls) -> dict[str, Any]:
    recent = [*group.recent[-_RECENT_CALLS:], *group.recent_messages[-_RECENT_CALLS:]]
    return {
        "axis": log.axis_of(group),
        "ranks": group.ranks,
        "collectives": group.collectives,
        "messages": group.messages,
        "recent": [call_data(log, call) for call in sorted(recent, key=lambda call: call.order)],
    }


def rule_of(roots: list[nn.Module], fqn: str) -> str:
    """The style of a module and the line of the plan that gives it, "" where no plan names it."""
    for root in roots:
        resolved = resolution_of(root)
        row = resolved.modules.get(fqn) if resolved is not None else None
        if row is not None:
            return ", ".join(filter(None, (str(row.rule.style), row.rule.where)))
    return ""


def identity() -> dict[str, Any]:
    """Of this process, and of the machine on which its id means something."""
    return {"host": platform.node(), "machine": _machine(), "pid": os.getpid()}


def _machine() -> str:
    parts = [platform.node()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with suppress(OSError):
            parts.append(read())
    return " ".join(parts)


def process_state(beat: dict[str, Any], machine: str) -> str:
    """What this machine knows of the process of a heartbeat: "gone", "stopped", "running", or "" for another
    machine's."""
    if not beat or beat.get("machine") != machine:
        return ""
    try:
        letter = Path(f"/proc/{beat['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")
