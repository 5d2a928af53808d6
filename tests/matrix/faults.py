"""Seeded faults of the package, which the matrix must find: one function is changed, and cells run until one differs.

A fault is an edit of the text of one function: `old` stands in it once, and becomes `new`. The file is compiled with
it, and the function gets the new code, so that every module that has imported it runs the fault. Each fault has a
process of its own, forked from a server that has imported everything; nothing that it changes is left.

Mistakes of tests/support/mutants.py are others: they are made in plans, which are data, and `verify` must find them.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.matrix import verdicts
from tests.matrix.axes import AXES
from tests.matrix.cells import CRASHED, RIGHT, WRONG, Verdict, bounds_of, cells_of, reference, run_cell
from tests.matrix.feature import load_features
from tests.matrix.verdicts import Cell
from tests.support.processes import server_context

RESULTS = Path(__file__).with_name("faults.json")
CELLS = 40
_TIMEOUT_S = 60.0  # of a cell; a fault may let ranks wait for each other
_KINDS = ("llama", "mixture", "gpt2", "hybrid", "own", "t5", "vit", "llama_equal")


@dataclass(frozen=True)
class Fault:
    """A mistake in one function.

    Attributes:
        name: what is done, in words. group: reductions, layouts, order, counts or state.
        where: `module:attribute`, under `parallelize`. old, new: the text that is changed, and what it becomes.
        axes: those most likely to see it, as patterns of names, a word each.
        rows: the features most likely to see it, as patterns too, the likeliest first.
        kinds: the kinds to begin with.
    """

    name: str
    group: str
    where: str
    old: str
    new: str
    axes: str
    rows: str = "targets"
    kinds: str = "llama mixture"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the function of this process has the fault."""
        function = function_at(self.where)
        stock, function.__code__ = function.__code__, self.code()
        _forget_results()
        try:
            yield
        finally:
            function.__code__ = stock
            _forget_results()

    def code(self) -> CodeType:
        """The function with the fault. Its file must have `old` once inside of the function."""
        module, _, qualname = self.where.partition(":")
        loaded = importlib.import_module(f"parallelize.{module}")
        source = inspect.getsource(loaded)
        lines = source.splitlines(keepends=True)
        node = _definition(ast.parse(source), qualname.split("."))
        start, stop = node.lineno - 1, node.end_lineno
        body = "".join(lines[start:stop])
        assert body.count(self.old) == 1, f"{self.name}: {self.where} has {self.old!r} {body.count(self.old)} times"
        changed = "".join(lines[:start]) + body.replace(self.old, self.new) + "".join(lines[stop:])
        return _nested_code(compile(changed, loaded.__file__, "exec"), qualname.split("."))

    def cells(self, table: verdicts.Table, most: int = CELLS) -> list[Cell]:
        """The cells to run, without those that are refused: by row, the likeliest kinds, the smallest axes."""
        kinds = [*self.kinds.split(), *(kind for kind in _KINDS if kind not in self.kinds.split())]
        axes = [name for name in AXES if any(fnmatchcase(name, pattern) for pattern in self.axes.split())]
        axes.sort(key=lambda name: AXES[name].world_size)
        rows = [row for pattern in self.rows.split() for row in load_features() if fnmatchcase(row, pattern)]
        found = [
            (row, kind, axis)
            for row in rows
            for kind in kinds
            for axis in axes
            if axis in cells_of(load_features()[row], kind)
            and ((row, kind, axis) not in table or is_right(table, (row, kind, axis)))
        ]
        found.sort(key=lambda cell: (kinds.index(cell[1]) > 1, rows.index(cell[0])))
        return found[:most]


def is_right(table: verdicts.Table, cell: Cell) -> bool:
    return cell in table and table[cell].word == RIGHT


@dataclass(frozen=True)
class Found:
    """What became of a fault.

    Attributes:
        cell: the first that differs; empty where none does. verdict: what it was. tried: how many cells ran.
    """

    fault: str
    group: str
    where: str
    cell: str = ""
    verdict: str = ""
    tried: int = 0

    def __bool__(self) -> bool:
        return bool(self.cell)


def function_at(where: str) -> FunctionType:
    """The function at `module:attribute`, under its decorators."""
    module, _, qualname = where.partition(":")
    value: Any = importlib.import_module(f"parallelize.{module}")
    for part in qualname.split("."):
        value = inspect.getattr_static(value, part)
    while not isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
        inner = next((a for a in ("__wrapped__", "__func__", "fget", "func") if getattr(value, a, None)), None)
        assert inner is not None, f"{where} is no function"
        value = getattr(value, inner)
    return value


def _definition(tree: ast.AST, parts: Sequence[str]) -> Any:
    kinds = (ast.FunctionDef, ast.ClassDef)
    for part in parts:
        tree = next(node for node in tree.body if isinstance(node, kinds) and node.name == part)
    return tree


def _nested_code(code: CodeType, parts: Sequence[str]) -> CodeType:
    for part in parts:
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == part)
    return code


# -- the search for a cell that differs -------------------------------------------------------------------------------


def run_faults(names: Sequence[str] = (), cells: int = CELLS, seconds: float | None = None, write: bool = False) -> int:
    """Try the faults with these words in their names, or all; how many are found by no cell.

    Args:
        cells: that may run for one fault. seconds: no fault is tried after so many. write: the results, as JSON.
    """
    from tests.matrix.fault_table import FAULTS

    stop = None if seconds is None else time.monotonic() + seconds
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    table, results = verdicts.read(), []
    for fault in chosen:
        if stop is not None and time.monotonic() > stop:
            break
        results.append(search(fault, fault.cells(table, cells), table))
        print(_line(results[-1]), flush=True)
    missed = [found for found in results if not found]
    print(f"{len(results) - len(missed)} of {len(results)} faults are found")
    if write:
        _write(results, [fault.name for fault in FAULTS])
    return len(missed)


def _write(results: Sequence[Found], names: Sequence[str]) -> None:
    """The results of these faults, and the earlier ones of the others that there are."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = {row["fault"]: row for row in [*earlier, *map(asdict, results)]}
    RESULTS.write_text(json.dumps([rows[name] for name in names if name in rows], indent=1) + "\n")


def _line(found: Found) -> str:
    what = f"{found.cell}: {found.verdict}" if found else f"NOT FOUND in {found.tried} cells"
    return f"{found.group:10} {found.fault}: {what}"[:200]


def search(fault: Fault, cells: list[Cell], table: verdicts.Table) -> Found:
    """The first of the cells that the fault changes."""
    fault.code()  # an error of the table is none of the package
    tried = 0
    for cell, verdict in _answers(fault, cells):
        tried += 1
        if differs(verdict, is_right(table, cell)) and (cell in table or _is_right_without(cell)):
            return Found(fault.name, fault.group, fault.where, " ".join(cell), str(verdict)[:160], tried)
    return Found(fault.name, fault.group, fault.where, tried=tried)


def _is_right_without(cell: Cell) -> bool:
    """Of a cell without a record."""
    return next(_answers(None, [cell]))[1].word == RIGHT


def differs(verdict: Verdict, was_right: bool) -> bool:
    """Whether a cell is what it may not be; refused, where it is known to be right without the fault."""
    return verdict.word in (WRONG, CRASHED) or (was_right and verdict.word != RIGHT)


def _answers(fault: Fault | None, cells: list[Cell]) -> Iterator[tuple[Cell, Verdict]]:
    """Each cell with its verdict, with the fault or without one, as it comes from a process of its own."""
    context = server_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(fault, cells, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        for cell in cells:
            if not ours.poll(_TIMEOUT_S):
                yield cell, Verdict(CRASHED, f"no verdict in {_TIMEOUT_S:g} s")
                return
            try:
                yield cell, ours.recv()
            except EOFError:
                process.join(5)
                yield cell, Verdict(CRASHED, f"its process ended with exit code {process.exitcode}")
                return
    finally:
        process.kill()
        process.join()


def _serve(fault: Fault | None, cells: list[Cell], pipe: Any) -> None:
    """What is compared is made before the fault where it is the package that makes it."""
    for name, kind, axis in cells:
        feature = load_features()[name]
        if feature.one_rank or feature.rounds is not None:
            expected = reference(feature, kind, AXES[axis].deep)
            bounds_of(feature, kind, AXES[axis].deep, expected)
    _quiet()
    with nullcontext() if fault is None else fault.applied():
        for cell in cells:
            verdict = run_cell(*cell)
            pipe.send(Verdict(verdict.word, verdict.detail))


def _quiet() -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _forget_results() -> None:
    """What functions of the package have kept of earlier calls, which may be of the one that is changed."""
    for value in gc.get_objects():
        if isinstance(value, functools._lru_cache_wrapper) and str(value.__module__).startswith("parallelize"):
            value.cache_clear()
