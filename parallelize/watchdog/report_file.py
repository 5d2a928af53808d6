"""One JSON file a rank with what it was doing when the run was ended, and reading the files of one run again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallelize.errors import ParallelizeError, Problem
from parallelize.watchdog.verdict import State

_MOST_BYTES = 16 << 20
_KEYS = {"rank", "size", "run", "time", "status"}


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


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES} bytes")
        state = json.loads(path.read_text())
        if not isinstance(state, dict) or not set(state) >= _KEYS:
            raise ValueError("it lacks " + ", ".join(sorted(_KEYS - set(state if isinstance(state, dict) else ()))))
    except (ValueError, RecursionError) as error:
        raise ParallelizeError(Problem("bad-report", f"not a report of a rank: {error}", str(path))) from error
    return state
