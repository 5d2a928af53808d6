"""What an uncaught error shows: of an error of this package, the caller's lines alone; and the text in torchrun's last block."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from parallelize.base.errors import ParallelizeError, is_of_caller

log = logging.getLogger("parallelize")


def shorten_tracebacks(error: BaseException) -> None:
    """Leave out, from an error of this package and those of this package that led to it, the lines of this package and of torch.

    The error says what is wrong and how to correct it; the caller's lines say where. All lines go to the debug log.
    """
    if isinstance(error, ParallelizeError):
        log.debug("all lines of the traceback", exc_info=error)
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ParallelizeError):
            link.__traceback__ = _of_caller(link.__traceback__) or link.__traceback__
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _of_caller(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if is_of_caller(trace.tb_frame):
            kept.append(trace)
        trace = trace.tb_next
    short: TracebackType | None = None
    for entry in reversed(kept):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def write_error_file(error: BaseException) -> None:
    """Write an error where torchrun reads it, in the format of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.

    A file that is there stays: the script has `record` of that module, which writes it too.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path) or not isinstance(error, Exception):
        return
    text, stack = (
        "".join(lines).rstrip() for lines in (traceback.format_exception_only(error), traceback.format_exception(error))
    )
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    partial = Path(f"{path}.{os.getpid()}")  # torchrun, which may end this process at any time, cannot read half a file
    with suppress(OSError):
        partial.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
        partial.replace(path)
