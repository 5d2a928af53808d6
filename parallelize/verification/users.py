"""Errors of what a user has written, told as problems: what was raised and where in their code, without a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from parallelize.errors import ModelError, ParallelizeError, Problem

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def blaming(slug: str, what: str, fix: str = "") -> Iterator[None]:
    """Turn whatever is raised inside into a ModelError; a ParallelizeError and a missing package pass as they are."""
    try:
        yield
    except (ParallelizeError, ImportError):
        raise
    except Exception as error:
        raise ModelError(Problem(slug, f"{what}: {told(error)}", place_of(error), fix=fix)) from error


def told(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not one.filename.startswith((_OURS, _TORCH, "<frozen"))]
    plain = [one for one in theirs if "site-packages" not in one.filename and "contextlib" not in one.filename]
    found = plain or theirs
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""
