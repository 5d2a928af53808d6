"""The commands of the matrix: `run`, `pass`; `python -m tests.matrix COMMAND --help`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_run, _add_pass):
        add(commands)
    arguments = vars(parser.parse_args())
    return arguments.pop("call")(**arguments)


def _add_run(commands) -> None:
    run = commands.add_parser("run", help="cells in this process, with the trace where it is one")
    run.add_argument("feature")
    run.add_argument("kind", nargs="?", default="all")
    run.add_argument("axes", nargs="*", metavar="axis")
    run.set_defaults(call=_run)


def _run(feature: str, kind: str, axes: list[str]) -> int:
    import torch

    from tests.matrix.cells import REFUSED, RIGHT, cells_of, run_cell
    from tests.matrix.feature import load_features
    from tests.matrix.kinds import KINDS

    torch.set_num_threads(1)
    failed = 0
    for name in list(KINDS) if kind == "all" else [kind]:
        for axis in axes or cells_of(load_features()[feature], name):
            began = time.perf_counter()
            verdict = run_cell(feature, name, axis)
            failed += verdict.word not in (RIGHT, REFUSED)
            print(f"{feature:20} {name:12} {axis:12} {time.perf_counter() - began:5.1f} s  {verdict}", flush=True)
            if axes:
                print(verdict.trace)
    return min(failed, 1)


def _add_pass(commands) -> None:
    whole = commands.add_parser("pass", help="every cell, in worker processes; goes on where it stopped")
    whole.add_argument("--feature", default="", help="only this row")
    whole.add_argument("--kind", default="", help="only this kind of model")
    whole.add_argument("--workers", type=int, default=2, help="processes (2)")
    whole.add_argument("--seconds", type=float, help="no cell begins after so many")
    whole.add_argument("--timeout", type=float, default=120.0, dest="timeout_s", help="of a cell, in seconds (120)")
    whole.add_argument("--fresh", action="store_true", help="all cells once more")
    whole.add_argument("--failed", action="store_true", help="cells that are wrong or crashed once more")
    whole.add_argument(
        "--any-sources", action="store_true", help="verdicts count although the package or the rows have changed since"
    )
    whole.add_argument("--record", action="store_true", help="write the golden table")
    whole.add_argument("--journal", type=Path, help="another file than .pytest_cache/matrix.jsonl")
    whole.set_defaults(call=_pass)


def _pass(journal: Path | None, **options) -> int:
    from tests.matrix.journal import JOURNAL
    from tests.matrix.passes import run_pass

    return min(run_pass(path=journal or JOURNAL, **options), 1)


if __name__ == "__main__":
    sys.exit(main())
