"""A rank ends when whoever started it ends, also by SIGKILL: no orphan goes on training and keeps a folder locked."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_SET_PDEATHSIG = 1  # of linux/prctl.h
_EVERY_S = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """End this process as soon as its parent has ended.

    On Linux the kernel does it; elsewhere a thread looks once a second.

    Args:
        parent: the process id that the parent has if it lives. None: the present one.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != expected:  # it ended before the call
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(expected,), name="parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY_S)
    os._exit(1)
