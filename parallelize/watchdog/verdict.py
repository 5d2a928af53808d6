"""From what every rank was doing to who is missing or different. Arithmetic on plain data, for running ranks and for
files.

A state of a rank is a dict, as `rank_state` makes it:

    rank, size, host, pid, time     who and when
    status                          "failed", "waits" (in a collective), "runs" (its own code) or "left" (its watch was closed)
    error                           {"text", "place", "stack"} of a failed rank
    waits_s, place, stack           how long and where its thread stands, innermost line last
    waiting                         {"group", "call"} of a rank that waits
    groups                          group to {"axis", "ranks", "collectives", "recent": calls}
    absent                          rank to what is known of ranks that did not answer this one
"""  # noqa: E501

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallelize.base.agreement import named_ranks
from parallelize.base.errors import ParallelizeError, Problem
from parallelize.base.mesh import MOST_RANKS

State = dict[str, Any]
States = Mapping[int, State]
_MOST_ROWS = 8
_STACK_LINES = 6


def call_text(call: Mapping[str, Any]) -> str:
    """One collective, as text: `all_reduce 12 [2, 16, 32] float32: layers.0.mlp.down_proj (rowwise, llama.yaml:14),
    forward`."""
    shape = f" {list(call['shape'])}" if call["shape"] else ""
    peer = f" {'to' if call['op'] == 'send' else 'from'} rank {call['peer']}" if call["peer"] is not None else ""
    if call["module"]:
        rule = f" ({call['rule']})" if call.get("rule") else ""
        place = f"{call['module']}{rule}, {call['phase']}"
    else:
        place = ", ".join(filter(None, (call["function"], call["phase"]))) or "the script"
    return f"{call['op']} {call['number']}{peer}{shape} {call['dtype']}: {place}"


def waiting_text(state: State) -> str:
    """What a waiting rank waits in."""
    waiting = state.get("waiting")
    if not waiting:
        return state.get("place") or "unknown code"
    group = state["groups"].get(waiting["group"], {})
    return f"{call_text(waiting['call'])}, over {group.get('axis', '?')}"


def judge(states: States, size: int, absent: Mapping[int, str]) -> Problem:
    """Who is missing or different, what each group was waiting for, and where ranks stand.

    Args:
        states: of the ranks that answered. size: number of ranks. absent: what is known of the others.

    Returns: a problem: `rank-failed`, `rank-gone`, `rank-left`, `collectives-differ`, `rank-missing` or
        `ranks-stand-still`.
    """
    failed = sorted(
        (state for state in states.values() if state["status"] == "failed"), key=lambda state: state["time"]
    )
    if failed:
        return _failure(failed, states)
    gone = [rank for rank in range(size) if rank not in states]
    if gone:
        return _gone(gone, absent, states)
    blamed, by_call = blame(states)
    left = [rank for rank in blamed if states[rank]["status"] == "left"]
    if left:
        what = f"{named_ranks(left)} left the loop while others go on"
        fix = (
            "give every rank the same number of steps and evaluations; `GlobalBatches` gives each rank as many batches"
        )
        return Problem("rank-left", what, rows=tuple(_rows_of(left, states)), fix=fix)
    if by_call:
        what = f"{named_ranks(blamed)} called other collectives than the rest of the group"
        fix = "give each rank the same branches, steps and calls; look for `if rank == ...` around a collective"
        return Problem("collectives-differ", what, rows=tuple(_rows_of(blamed, states)), fix=fix)
    if blamed:
        what = f"{named_ranks(blamed)} did not come to a collective: {_where(states[blamed[0]])}"
        return Problem("rank-missing", what, rows=tuple(_rows_of(blamed, states)), fix=_MISSING)
    rows = (*_waiting_rows(states, ()), *_stacks(sorted(states), states))
    return Problem("ranks-stand-still", "ranks wait, and each seems to have called the same", rows=rows, fix=_MISSING)


_MISSING = "look at the stack of the rank that is named; where it only needs longer, give `watch` a longer timeout_s"


def blame(states: States) -> tuple[list[int], bool]:
    """(ranks that the others wait for and that wait for nobody, whether these have called something else).

    Where ranks wait for each other in a circle, all of them are named: each has called something else than the next.
    """
    edges: dict[int, set[int]] = {}
    other_calls: set[int] = set()
    for rank, state in states.items():
        if state["status"] == "waits":
            behind, different = _absent_and_different(state, states)
            edges[rank] = behind | different
            other_calls |= different
    targets = set().union(*edges.values()) if edges else set()
    if not targets:
        running = {rank for rank, state in states.items() if state["status"] != "waits"}
        return sorted(running if edges else ()), False
    roots = {rank for rank in targets if not edges.get(rank)}
    if other_calls and not roots - other_calls:
        return _smaller_side(other_calls, edges), True
    return (sorted(roots), False) if roots else (sorted(targets), True)


def _smaller_side(different: set[int], edges: Mapping[int, set[int]]) -> list[int]:
    """Of ranks that call differently from each other, those that most of the others differ from."""
    votes = {rank: sum(rank in targets for targets in edges.values()) for rank in different}
    most = max(votes.values())
    return sorted(rank for rank, number in votes.items() if number == most)


def _absent_and_different(state: State, states: States) -> tuple[set[int], set[int]]:
    """(ranks that have not made the call in which a rank waits, ranks that made another one)."""
    waiting = state.get("waiting")
    if not waiting:  # in code of the store or of C++: for those who are not there
        return {rank for rank, other in states.items() if other["status"] in ("runs", "left")}, set()
    group, call = state["groups"][waiting["group"]], waiting["call"]
    other_ranks = [rank for rank in group["ranks"] if rank != state["rank"] and rank in states]
    if call["peer"] is not None or call["op"] == "recv_anysource":
        return {rank for rank in other_ranks if states[rank]["status"] in ("runs", "left")}, set()
    behind, different = set(), set()
    for rank in other_ranks:
        group_of_rank = states[rank]["groups"].get(waiting["group"])
        if group_of_rank is None or group_of_rank["collectives"] <= call["number"]:
            behind.add(rank)
        elif any(recent["number"] == call["number"] and _differs(recent, call) for recent in group_of_rank["recent"]):
            different.add(rank)
    if not behind and not different:  # an earlier call that did not block, of another group
        behind = set(_ranks_behind(state, states))
    return behind, different


def _ranks_behind(state: State, states: States) -> Iterator[int]:
    for key, group in state["groups"].items():
        for rank in group["ranks"]:
            if rank in states and rank != state["rank"]:
                group_of_rank = states[rank]["groups"].get(key, {"collectives": 0})
                if group_of_rank["collectives"] < group["collectives"]:
                    yield rank


def _differs(call: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("op", "dtype", "module", "phase") if call["module"] and other["module"] else ("op", "dtype")
    return any(call[key] != other[key] for key in keys)


# -- text -------------------------------------------------------------------------------------------------------------


def _failure(failed: list[State], states: States) -> Problem:
    first = failed[0]
    error = first["error"]
    problems = error.get("problems") or []
    rows = [("error", error["text"])] if "\n" in error["text"] and not problems else []
    rows += [(label, text) for problem in problems for label, text in (*problem[2], ("advice", problem[3])) if text]
    rows += [("at", error["place"])] if error.get("place") else []
    rows += [("in", error["module"])] if error.get("module") else []
    rows += [(f"also rank {state['rank']}", state["error"]["text"].splitlines()[0]) for state in failed[1:_MOST_ROWS]]
    rows += _waiting_rows(states, ())
    what = f"rank {first['rank']} raised {error['text'].splitlines()[0]}"
    return Problem("rank-failed", what, rows=tuple(rows), fix=f"correct the error of rank {first['rank']}")


def _gone(gone: list[int], absent: Mapping[int, str], states: States) -> Problem:
    reasons = [f"{absent.get(rank, 'it wrote nothing')}" for rank in gone]
    rows = [(f"rank {rank}", reason) for rank, reason in zip(gone, reasons, strict=True)][:_MOST_ROWS]
    rows += _waiting_rows(states, ())
    what = f"{named_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone: {reasons[0]}"
    fix = "look at that process: its own messages, the log of the machine (out of memory?), its launcher"
    return Problem("rank-gone", what, rows=tuple(rows), fix=fix)


def _rows_of(blamed: list[int], states: States) -> Iterator[tuple[str, str]]:
    for rank in blamed[:_MOST_ROWS]:
        yield f"rank {rank}", _where(states[rank])
    yield from _waiting_rows(states, blamed)
    yield from _stacks(blamed[:2], states)


def _where(state: State) -> str:
    if state["status"] == "left":
        return f"closed its watch after {state.get('total', 0)} calls"
    if state["status"] == "waits":
        return f"it waits in {waiting_text(state)}"
    return f"it has been for {state['waits_s']:.1f} s at {state['place']}" if state.get("place") else "in its own code"


def _waiting_rows(states: States, without: list[int] | tuple[int, ...]) -> list[tuple[str, str]]:
    ranks_of: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if state["status"] == "waits" and rank not in without:
            ranks_of.setdefault(waiting_text(state), []).append(rank)
    return [(f"{named_ranks(ranks)} waited", f"in {text}") for text, ranks in list(ranks_of.items())[:_MOST_ROWS]]


def _stacks(ranks: list[int], states: States) -> Iterator[tuple[str, str]]:
    for rank in ranks[:_MOST_ROWS]:
        for index, line in enumerate(states[rank].get("stack", [])[-_STACK_LINES:]):
            yield (f"stack of {rank}" if index == 0 else ""), line


# -- report file -----------------------------------------------------------------------------------------------------
# One JSON file a rank with what it was doing when the run was ended, and reading the files of one run again.


_MOST_BYTES = 16 << 20
_KEYS: dict[str, Any] = {"rank": int, "size": int, "run": str, "time": (int, float), "status": str}


def write_state(folder: Path, state: State) -> Path:
    """Write `rank-N.json`, by a rename, so that no reader sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{state['rank']}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(state, indent=1) + "\n")
    unfinished.replace(path)
    return path


def crash_file(folder: Path, rank: int) -> Path:
    """Where the interpreter writes the stacks of a crash, or of a thread that does not release Python's lock."""
    return folder / f"rank-{rank}.crash.txt"


def remove_if_empty(path: Path) -> None:
    """Remove a file into which nothing was written."""
    with suppress(OSError):
        if not path.stat().st_size:
            path.unlink()


def read_states(folder: Path) -> dict[int, State]:
    """The states of the newest run in a folder, by rank.

    Raises: ParallelizeError `no-reports`, `bad-report`.
    """
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        what = f"{folder} has no file rank-N.json"
        fix = "the folder is that of `watch(..., folder=...)`; files are written when a run is ended by an error"
        raise ParallelizeError(Problem("no-reports", what, fix=fix))
    states = [_read(path) for path in paths]
    newest = max(states, key=lambda state: state["time"])["run"]
    return {state["rank"]: state for state in states if state["run"] == newest}


def bad_report(path: Path, why: object) -> ParallelizeError:
    return ParallelizeError(Problem("bad-report", f"not a report of a rank: {why}", str(path)))


def _read(path: Path) -> Any:
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise ValueError("no regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES} bytes")
        state = json.loads(path.read_text())
        if not isinstance(state, dict) or not set(state) >= set(_KEYS):
            raise ValueError(
                "it lacks " + ", ".join(sorted(set(_KEYS) - set(state if isinstance(state, dict) else ())))
            )
        for key, kind in _KEYS.items():
            if not isinstance(state[key], kind) or isinstance(state[key], bool):
                raise ValueError(f"its {key} is {json.dumps(state[key])[:40]}")
        if not 0 <= state["rank"] < state["size"] <= MOST_RANKS:
            raise ValueError(f"rank {state['rank']} of {state['size']}")
    except (ValueError, RecursionError) as error:
        raise bad_report(path, error) from error
    return state
