"""The tests of a room stand in the folder of its name: `parallelize/ops/matmul/` has `tests/ops/matmul/`.

Tests of several rooms stand in the highest of them: all axes together in `tests/training/`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import parallelize

PACKAGE = Path(parallelize.__file__).parent
TESTS = Path(__file__).parents[1]

NOT_ROOMS = {
    "known_failures": "public failures of other projects, which go through all rooms",
    "checkpoint/written_before": "what an earlier version has written, and the script that wrote it",
    "matrix": "features, which go through all rooms",
    "matrix/features": "its rows",
    "policy": "rules about the whole tree",
    "support": "what tests share, and the tests of it",
    "benchmarks": "mirrors `benchmarks/`",
    "tp_plans": "mirrors `tp_plans/`",
}
"""Folders of `tests/` without a room."""

pytestmark = pytest.mark.torch_free


def rooms_of(package: Path) -> set[str]:
    """Folders with code, as paths relative to the package."""
    folders = {path.parent for path in package.rglob("*.py")} - {package}
    return {folder.relative_to(package).as_posix() for folder in folders}


def folders_of(tests: Path) -> set[str]:
    """Folders with tests or with what tests use, as paths relative to `tests/`."""
    folders = {path.parent for path in tests.rglob("*.py")} - {tests}
    return {folder.relative_to(tests).as_posix() for folder in folders}


def folders_with_tests(tests: Path) -> set[str]:
    """Folders that have a test of their own or below them."""
    parents = {parent for path in tests.rglob("test_*.py") for parent in path.relative_to(tests).parents}
    return {parent.as_posix() for parent in parents}


def mismatches(package: Path, tests: Path, not_rooms: set[str]) -> list[str]:
    rooms = rooms_of(package)
    return [
        *(f"tests/{name}/ mirrors no room" for name in sorted(folders_of(tests) - rooms - not_rooms)),
        *(f"{name}/ has no tests in tests/{name}/" for name in sorted(rooms - folders_with_tests(tests))),
        *(f"{name} is listed and is a room" for name in sorted(not_rooms & rooms)),
        *(f"{name} is listed and is not there" for name in sorted(not_rooms - folders_of(tests))),
    ]


def test_tests_mirror_the_rooms():
    assert not mismatches(PACKAGE, TESTS, set(NOT_ROOMS))


def test_a_room_without_tests_and_tests_without_a_room_are_noticed(tmp_path):
    code, tests = tmp_path / "code", tmp_path / "tests"
    for file in ("ops/library.py", "ops/matmul/op.py", "plan/load.py"):
        (code / file).parent.mkdir(parents=True, exist_ok=True)
        (code / file).touch()
    for file in ("ops/test_library.py", "plans/test_load.py", "plan/jobs.py", "support/models.py"):
        (tests / file).parent.mkdir(parents=True, exist_ok=True)
        (tests / file).touch()
    assert mismatches(code, tests, {"support", "ops", "gone"}) == [
        "tests/plans/ mirrors no room",
        "ops/matmul/ has no tests in tests/ops/matmul/",
        "plan/ has no tests in tests/plan/",
        "ops is listed and is a room",
        "gone is listed and is not there",
    ]
