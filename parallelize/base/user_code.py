"""Whose code runs: the innermost frame of a stack or traceback that is the user's."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import FrameType

from parallelize.base.package import FOLDER

_SPEC = find_spec("torch")
TORCH = os.path.dirname(_SPEC.origin) if _SPEC is not None and _SPEC.origin else "torch"
"""Its folder. Does not import torch."""
PYTHON, INSTALLED = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
_OURS = (FOLDER + os.sep, TORCH + os.sep)


def innermost(frame: FrameType | None, passed: tuple[str, ...]) -> FrameType | None:
    """The innermost frame, from this one outwards, whose file begins with none of these folders."""
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return frame


def frame_of_caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither of this package nor of torch: of the user or of a library."""
    return innermost(frame, _OURS)


def place_of(frame: FrameType | None) -> str:
    """`file:line` without the file's folder; empty for no frame."""
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_ours(file: str) -> bool:
    """Whether a file is of this package or of PyTorch."""
    return file.startswith(_OURS)


def is_user_code(file: str) -> bool:
    """Whether a file is neither of this package, nor of PyTorch, nor installed, nor of Python itself."""
    return not file.startswith((*_OURS, PYTHON, "<")) and "site-packages" not in file


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """(frame, line) of an error's traceback, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def location_of(error: BaseException) -> str:
    """`file:line` of the innermost frame of an error that is the user's; or else of a library, or empty."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames_of(error)]
    foreign = [(file, line) for file, line in places if not file.startswith((*_OURS, "<frozen"))]
    own = [(file, line) for file, line in foreign if "site-packages" not in file and "contextlib" not in file]
    file, line = (own or foreign or [("", 0)])[-1]
    return f"{file}:{line}" if file else ""


def innermost_module(error: BaseException, names: Mapping[int, str]) -> str:
    """The name of the innermost module whose method is in an error's traceback; empty where there is none.

    names: by the id of each module.
    """
    found = [names.get(id(frame.f_locals.get("self")), "") for frame, _ in frames_of(error)]
    return next((name for name in reversed(found) if name), "")
