"""One JSON file a rank with what it was doing when the run was ended, and reading the files of one run again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallelize.base.errors import ParallelizeError, Problem
from parallelize.base.mesh import MOST_RANKS
from parallelize.watchdog.verdict import State

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
