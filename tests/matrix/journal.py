"""The journal of passes: each verdict with its seconds, one JSON line a cell, so that a pass goes on where it stopped.

An entry counts for the sources that it was made with: the package, the machinery of the matrix and the file of the row.
A new file of rows therefore leaves the verdicts of the others alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import parallelize
from tests.matrix.cells import Verdict
from tests.matrix.feature import feature_of, is_feature
from tests.matrix.verdicts import Cell

_ROOT = Path(__file__).parents[2]
JOURNAL = _ROOT / ".pytest_cache" / "matrix.jsonl"
_MACHINERY = ("axes.py", "cells.py", "feature.py", "kinds.py", "loops.py", "sides.py")


@dataclass(frozen=True)
class Entry:
    """A cell as it was run once. sources: see `sources_of`."""

    feature: str
    kind: str
    axis: str
    word: str
    detail: str
    seconds: float
    sources: str

    @property
    def cell(self) -> Cell:
        return self.feature, self.kind, self.axis

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.word, self.detail)


def append(entry: Entry, path: Path = JOURNAL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")


def entries(path: Path = JOURNAL, any_sources: bool = False) -> dict[Cell, Entry]:
    """The last entry of each cell that was made with the sources as they are, or with any."""
    last: dict[Cell, Entry] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = Entry(**json.loads(line))
        except ValueError:  # cut off, because the pass was ended
            continue
        if is_feature(entry.feature) and (any_sources or entry.sources == sources_of(entry.feature)):
            last[entry.cell] = entry
    return last


def sources_of(feature_name: str) -> str:
    """A digest of what the verdicts of a row depend on."""
    files = [Path(file) for file in feature_of(feature_name).files]
    return hashlib.sha256((_shared() + _digest(files)).encode()).hexdigest()[:16]


@cache
def _shared() -> str:
    folder = Path(parallelize.__file__).parent
    files = [*folder.rglob("*.py"), *folder.rglob("*.json"), *(_ROOT / "tp_plans").iterdir()]
    return _digest([*files, *(Path(__file__).with_name(name) for name in _MACHINERY)])


@cache
def _digest_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _digest(paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(str(path.relative_to(_ROOT)).encode() + _digest_of(path))
    return whole.hexdigest()
