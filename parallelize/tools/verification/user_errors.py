"""Errors in a user's code, reported as problems: what was raised and where in that code, without a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.package import FOLDER

_TORCH = str(Path(torch.__file__).parent)


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


def location_of(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's code: not of PyTorch, of this package or, if possible, of a
    library."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith((FOLDER, _TORCH, "<frozen"))]
    own = [frame for frame in foreign if "site-packages" not in frame.filename and "contextlib" not in frame.filename]
    candidates = own or foreign
    return f"{candidates[-1].filename}:{candidates[-1].lineno}" if candidates else ""
