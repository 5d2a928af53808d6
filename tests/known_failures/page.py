"""The table of docs/known-failures.md, written from the failures that the tests rebuild.

python -m tests.known_failures.page
"""

from __future__ import annotations

from pathlib import Path

from tests.known_failures.failure import Failure, by_subject
from tests.matrix.cells import RIGHT

PAGE = Path(__file__).parents[2] / "docs" / "known-failures.md"
_BEGIN, _END = "<!-- rows of tests/known_failures/ -->\n", "<!-- end of the rows -->\n"


def written(text: str) -> str:
    """The page with the rows of now."""
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}{rows()}{_END}{rest.split(_END)[1]}"


def rows() -> str:
    head = "| report | what went wrong there | rebuilt here | answer | test |\n| --- | --- | --- | --- | --- |\n"
    parts = [f"\n## {title}\n\n{head}{''.join(map(_row, each))}" for title, each in by_subject().items()]
    return "".join(parts) + "\n"


def _row(failure: Failure) -> str:
    cells = [f"{failure.link}, {failure.month}", failure.symptom, failure.rebuilt, answer(failure), f"`{failure.name}`"]
    return f"| {' | '.join(cells)} |\n"


def answer(failure: Failure) -> str:
    if failure.answer == RIGHT:
        return "right: " + ("that of one rank" if failure.place and failure.place.one_rank else "that of one process")
    return f"found by {failure.told}: `{failure.answer}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
