"""The key of a run's file that an error is about, for what is only known when a rank builds the run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from parallelize.base.errors import ParallelizeError, Problem
from parallelize.launch.config.run_config import RunConfig

_LABEL = "named by"


@contextmanager
def naming(config: RunConfig, *keys: str) -> Iterator[None]:
    """Give the problems of an error the places of these keys, which are given in the file; all of them may be its cause.

    Raises: the same error, of the same class.
    """
    try:
        yield
    except ParallelizeError as error:
        places = tuple((_LABEL, f"{config.place(key)}: {key}") for key in keys if key in config.places)
        if not places or any(label == _LABEL for problem in error.problems for label, _ in problem.rows):
            raise
        raise type(error)(*(_placed(problem, places) for problem in error.problems)) from error


def _placed(problem: Problem, places: tuple[tuple[str, str], ...]) -> Problem:
    if not problem.where and len(places) == 1:
        return replace(
            problem,
            where=places[0][1].rpartition(": ")[0],
            rows=(*problem.rows, ("key", places[0][1].rpartition(": ")[2])),
        )
    return replace(problem, rows=(*problem.rows, *places))
