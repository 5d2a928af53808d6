"""Errors in a user's code, reported as problems: what was raised and where in that code, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.user_code import location_of


@contextmanager
def blaming(slug: str, what: str, fix: str = "") -> Iterator[None]:
    """Turn any exception into a ModelError. A ParallelizeError and an ImportError pass unchanged."""
    try:
        yield
    except (ParallelizeError, ImportError):
        raise
    except Exception as error:
        raise ModelError(Problem(slug, f"{what}: {summary(error)}", location_of(error), fix=fix)) from error


def summary(error: BaseException) -> str:
    """An error's type and the first two lines of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__
