"""The call site of a draw, read from the stack of Python: the innermost module that is called, and the path to the draw inside of it.

The path has the functions of the model's own code with the instruction of each, so that it is the same on every rank, and again in a
recompute. What runs around a module (a pipeline stage, a recomputed unit, hooks, wrappers) is not in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint

from parallelize.base.errors import ModelError, Problem
from parallelize.base.package import FOLDER

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = FOLDER + os.sep
_DTENSOR = os.path.join(_TORCH, "distributed", "tensor") + os.sep
_MODULES = nn.modules.module.__file__
_INDUCTOR = "torch._inductor."  # begins the name of the module that a compiled graph's file is
_UNITS = os.path.join(_PACKAGE, "axes", "recomputation", "unit.py")


class DrawCall(NamedTuple):
    """module: the innermost known module that is called. path: of the draw in its code. place: file and line, for messages.

    compiled: whether a compiled graph draws, the seeds of its own generator.
    """

    module: nn.Module
    path: str
    place: str
    compiled: bool = False


def draw_call(is_known: Callable[[nn.Module], bool], again: bool) -> DrawCall | None:
    """The call site of the draw that runs. None: of no known module, or by a DTensor.

    Args:
        again: whether backward runs, so that it is a recompute.

    Raises: ModelError `unplaceable-draw` in a checkpointed function that is not the call of a module: no recompute would find it.
    """
    frame: FrameType | None = sys._getframe(3)
    path: list[str] = []
    place, in_checkpoint, compiled = "", False, False
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(_DTENSOR):
            return None
        if file == checkpoint.__file__:
            if again:  # the call of the module has ended
                return None
            in_checkpoint = in_checkpoint or torch.is_grad_enabled()
        compiled = compiled or frame.f_globals.get("__name__", "").startswith(_INDUCTOR)
        module = _called(frame)
        if module is not None and is_known(module):
            if in_checkpoint:
                raise _checkpointed(place)
            return DrawCall(module, "/".join(reversed(path)), place, compiled)
        if not file.startswith((_TORCH, _PACKAGE)):
            place = place or f"{os.path.basename(file)}:{frame.f_lineno}"
            if not in_checkpoint:
                path.append(f"{code.co_name}:{frame.f_lasti}")
        frame = frame.f_back
    return None


def _called(frame: FrameType) -> nn.Module | None:
    """The module whose call, or whose pass as a recomputed unit, this frame is."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "_call_impl" and file == _MODULES:
        return frame.f_locals["self"]
    if name == "_pass" and file == _UNITS:
        return frame.f_locals["module"]
    return None


def _checkpointed(place: str) -> ModelError:
    what = (
        f"{place} draws random numbers in a checkpointed function, which is called again in backward without its module"
    )
    return ModelError(
        Problem("unplaceable-draw", what, fix="checkpoint the call of a module, or use parallelize.recompute")
    )
