"""Commands: `run`, `pass`, `pairs`, `triples`, `shrink`, `faults`; `python -m tests.matrix COMMAND --help`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_run, _add_pass, _add_pairs, _add_shrink, _add_faults):
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
    from tests.matrix.feature import feature_of
    from tests.matrix.kinds import KINDS

    torch.set_num_threads(1)
    failed = 0
    for name in list(KINDS) if kind == "all" else [kind]:
        for axis in axes or cells_of(feature_of(feature), name):
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
    _add_options(whole, "the golden table", "matrix")
    whole.set_defaults(call=_pass)


def _add_options(command, table: str, journal: str) -> None:
    command.add_argument("--workers", type=int, default=2, help="processes (2)")
    command.add_argument("--seconds", type=float, help="no cell begins after so many")
    command.add_argument("--timeout", type=float, default=120.0, dest="timeout_s", help="of a cell, in seconds (120)")
    command.add_argument("--fresh", action="store_true", help="all cells once more")
    command.add_argument("--failed", action="store_true", help="cells that are wrong or crashed once more")
    command.add_argument(
        "--any-sources", action="store_true", help="verdicts count although the package or the rows have changed since"
    )
    command.add_argument("--record", action="store_true", help=f"write {table}")
    command.add_argument("--journal", type=Path, help=f"another file than .pytest_cache/{journal}.jsonl")


def _pass(journal: Path | None, **options) -> int:
    from tests.matrix.journal import JOURNAL
    from tests.matrix.passes import run_pass

    return min(run_pass(path=journal or JOURNAL, **options), 1)


def _add_pairs(commands) -> None:
    pairs = commands.add_parser("pairs", help="every two rows that meet in one loop; goes on where it stopped")
    pairs.add_argument("--together", type=int, default=2, help="rows of a cell (2); more need fewer cells")
    _add_options(pairs, "docs/matrix.md", "pairs")
    pairs.set_defaults(call=_pairs)
    triples = commands.add_parser("triples", help="so many cells of three rows, drawn by a seed")
    triples.add_argument("cells", type=int)
    triples.add_argument("--seed", type=int, help="another seed draws other cells")
    _add_options(triples, "docs/matrix.md", "pairs")
    triples.set_defaults(call=_triples)


def _pairs(together: int, **options) -> int:
    from tests.matrix.pairs import cover

    return _met(list(cover(together)), **options)


def _triples(cells: int, seed: int | None, **options) -> int:
    from tests.matrix.pairs import SEED, drawn

    return _met(drawn(3, cells, SEED if seed is None else seed), **options)


def _met(cells: list, journal: Path | None, record: bool, **options) -> int:
    from tests.matrix.pairs import JOURNAL, run_pair
    from tests.matrix.passes import failures, run_through
    from tests.matrix.record import write_record

    found = run_through(cells, {}, path=journal or JOURNAL, job=run_pair, **options)
    if record:
        write_record(journal or JOURNAL)
    return min(len(failures(found, {})), 1)


def _add_shrink(commands) -> None:
    small = commands.add_parser("shrink", help="a failing cell made small, and a script that shows it")
    for name in ("feature", "kind", "axis"):
        small.add_argument(name)
    small.add_argument("--seconds", type=float, default=120.0, help="no smaller cell is tried after so many (120)")
    small.set_defaults(call=_shrink)


def _shrink(feature: str, kind: str, axis: str, seconds: float) -> int:
    import torch

    from tests.matrix.cells import REFUSED, RIGHT
    from tests.matrix.shrink import shrink

    torch.set_num_threads(1)
    cell, verdict = shrink(feature, kind, axis, seconds)
    print(f"{cell}: {verdict}\n\n{cell.script()}")
    return int(verdict.word not in (RIGHT, REFUSED))


def _add_faults(commands) -> None:
    faults = commands.add_parser("faults", help="seeded faults of the package, and the cells that find them")
    faults.add_argument("names", nargs="*", metavar="name", help="only these; default: all")
    faults.add_argument("--cells", type=int, default=40, help="cells that may be run for a fault (40)")
    faults.add_argument("--seconds", type=float, help="no fault is tried after so many")
    faults.add_argument("--write", action="store_true", help="write tests/matrix/faults.json")
    faults.set_defaults(call=_faults)


def _faults(**options) -> int:
    from tests.matrix.faults import run_faults

    return run_faults(**options)


if __name__ == "__main__":
    sys.exit(main())
