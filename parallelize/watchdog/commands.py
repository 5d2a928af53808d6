"""`parallelize diagnose`: the files that the ranks of a run wrote, merged into who was missing or different."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallelize.base.terminal.console import PROBLEM_FOUND, add_json, print_json, show
from parallelize.watchdog.verdict import State, bad_report, call_text, crash_file, judge, read_states, waiting_text

_LAST_CALLS = 4


def add_commands(verbs: Any) -> None:
    diagnose = verbs.add_parser("diagnose", help="say why a watched run stopped, from the files of its ranks")
    diagnose.add_argument("folder", type=Path, metavar="FOLDER", help="that of `watch(folder=...)`")
    add_json(diagnose)
    diagnose.set_defaults(run=_diagnose)


def _diagnose(options: argparse.Namespace) -> int:
    states = read_states(options.folder)
    try:
        return _show(options, with_left(states))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise bad_report(options.folder, f"{type(error).__name__}: {error}") from error


def _show(options: argparse.Namespace, states: dict[int, State]) -> int:
    size = next(iter(states.values()))["size"]
    verdict = judge(states, size, absent_of(states))
    crashes = crashes_in(options.folder, size)
    if options.json:
        print_json(
            {
                "slug": verdict.slug,
                "what": verdict.what,
                "rows": [list(row) for row in verdict.rows],
                "fix": verdict.fix,
                "size": size,
                "states": {str(rank): state for rank, state in states.items()},
                "crashes": {str(rank): text for rank, text in crashes.items()},
            }
        )
        return PROBLEM_FOUND
    lines = [line for rank in range(size) for line in rank_lines(rank, states.get(rank), crashes.get(rank, ""))]
    show("\n".join([str(verdict), "", *lines]))
    return PROBLEM_FOUND


def with_left(states: dict[int, State]) -> dict[int, State]:
    """With the ranks that had left the loop, and so wrote no file, as the others knew them."""
    known = {int(rank): left for state in states.values() for rank, left in state.get("left", {}).items()}
    return known | states


def absent_of(states: dict[int, State]) -> dict[int, str]:
    """What any rank knew of ranks that did not answer it."""
    merged: dict[int, str] = {}
    for state in states.values():
        for rank, text in state.get("absent", {}).items():
            merged.setdefault(int(rank), text)
    return merged


def crashes_in(folder: Path, size: int) -> dict[int, str]:
    """The Python stacks that the interpreter wrote when it crashed, by rank."""
    paths = {rank: crash_file(folder, rank) for rank in range(size)}
    return {rank: path.read_text() for rank, path in paths.items() if path.exists() and path.stat().st_size}


def rank_lines(rank: int, state: State | None, crash: str) -> list[str]:
    """One rank as lines: what it did, where, its last calls."""
    if state is None:
        lines = [f"rank {rank}: no file"]
    elif state["status"] == "failed":
        lines = [
            f"rank {rank}: raised {state['error']['text'].splitlines()[0]}",
            *_indented(state["error"]["stack"][-6:]),
        ]
    elif state["status"] == "waits":
        lines = [f"rank {rank}: waited {state['waits_s']:.1f} s in {waiting_text(state)}"]
        lines += _indented([f"at {state['place']}"] if state.get("place") else [])
    elif state["status"] == "left":
        lines = [f"rank {rank}: left the loop"]
    else:
        lines = [f"rank {rank}: ran its own code", *_indented(state["stack"][-6:])]
    if state is not None:
        lines += _indented(["last calls:", *(f"  {text}" for text in _last_calls(state))])
    if crash:
        lines += _indented(["crash:", *crash.splitlines()[:12]])
    return lines


def _last_calls(state: State) -> list[str]:
    calls = [(call, group["axis"]) for group in state["groups"].values() for call in group["recent"]]
    calls.sort(key=lambda pair: pair[0]["order"])
    return [f"{call_text(call)}, over {axis}" for call, axis in calls[-_LAST_CALLS:]]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
