"""An error that ends one rank before it comes to a handshake, told to the ranks that wait there, through the store."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from parallelize.base.errors import ParallelizeError, is_of_caller
from parallelize.base.torch_private import torch_groups as private_groups

_KEY = "parallelize/uncaught"
LATE = "did not come in time"
_LAST_S = 1.0
"""How long rank 0, whose process may have the store, lives on so that the others can read its error."""
_ANY = f"{_KEY}/any"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.02
_PAUSE_PER_RANK_S = 1e-4
"""So that all ranks together ask a store no more than 20,000 times a second, however many they are."""
_BLOCK = 256
"""Keys of one request."""


@lru_cache(maxsize=1)
def publish_uncaught_errors() -> None:
    """From now on, an uncaught error of this process goes to torchrun's error file, is printed as before, but of an
    error of this package the caller's lines alone, and is stored for the other ranks."""
    previous, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            previous(kind, error, trace)
            return
        shorten_tracebacks(error)
        write_error_file(error)  # before a hook that ends the process
        previous(kind, error, error.__traceback__)
        _publish("".join(traceback.format_exception_only(kind, error)).strip())

    sys.excepthook = hook


def _publish(text: str) -> None:
    store = private_groups.default_store() if dist.is_available() and dist.is_initialized() else None
    if store is None or dist.get_world_size() == 1:
        return
    with suppress(RuntimeError):
        store.set(f"{_KEY}/{dist.get_rank()}", text)
        store.set(_ANY, "")
        if dist.get_rank() == 0:
            time.sleep(_LAST_S)


def uncaught_error_of(rank: int, store: dist.Store) -> str:
    """The error that ended a rank, "" where none is known."""
    key = f"{_KEY}/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def wait_for_key(store: dist.Store, key: str, rank: int, timeout_s: float, waiting: int = 1) -> str:
    """Wait until a rank has set a key, it has ended with an error, or the time is over.

    waiting: how many ranks wait so; the more, the less often each asks.

    Returns: "" if the key is set, else the error, or why there is none.
    """
    for _ in _polls(timeout_s, waiting):
        try:
            if store.check([key]):
                return ""
            if text := uncaught_error_of(rank, store):
                return text
        except RuntimeError:  # the process that has the store is gone
            return LATE
    return LATE


def wait_for_keys(store: dist.Store, keys: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Wait until every rank has set its key, one of them has ended with an error, or the time is over.

    Args:
        keys: rank -> key.

    Returns: rank -> error of those that ended with one; without any, those that are late; {} if all keys are set.
    Cost: a request for 256 keys, and one for each poll.
    """
    names = list(keys.values())
    blocks = [names[first : first + _BLOCK] for first in range(0, len(names), _BLOCK)]
    try:
        for _ in _polls(timeout_s):
            while blocks and store.check(blocks[0]):
                blocks.pop(0)
            if not blocks:
                return {}
            if store.check([_ANY]) and (errors := _errors_of_absent(store, keys)):
                return errors
        return {rank: LATE for rank, key in keys.items() if not store.check([key])}
    except RuntimeError:  # the process that has the store is gone
        return dict.fromkeys(keys, LATE)


def _errors_of_absent(store: dist.Store, keys: dict[int, str]) -> dict[int, str]:
    texts = {rank: uncaught_error_of(rank, store) for rank, key in keys.items() if not store.check([key])}
    return {rank: text for rank, text in texts.items() if text}


def _polls(timeout_s: float, waiting: int = 1) -> Iterator[None]:
    """Once now, and then after longer and longer pauses until the time is over."""
    deadline = time.monotonic() + timeout_s
    longest = max(_LONGEST_PAUSE_S, _PAUSE_PER_RANK_S * waiting)
    pause = max(_SHORTEST_PAUSE_S, _PAUSE_PER_RANK_S * waiting / 8)
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
        yield


# -- printed errors --------------------------------------------------------------------------------------------------
# What an uncaught error shows: of an error of this package, the caller's lines alone; and the text in torchrun's last
# block.


log = logging.getLogger("parallelize")


def shorten_tracebacks(error: BaseException) -> None:
    """Leave out, from an error of this package and those of this package that led to it, the lines of this package and
    of torch.

    The error says what is wrong and how to correct it; the caller's lines say where. All lines go to the debug log.
    """
    if isinstance(error, ParallelizeError):
        log.debug("all lines of the traceback", exc_info=error)
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ParallelizeError):
            link.__traceback__ = _traceback_of_caller(link.__traceback__) or link.__traceback__
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _traceback_of_caller(trace: TracebackType | None) -> TracebackType | None:
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
    """Write an error where torchrun reads it, in the format of
    `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.

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
