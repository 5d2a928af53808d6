"""`watch`: the one call that opens a watch, and what it replaces in this process while it is open."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import HandshakeError, ModelError, ParallelizeError, Problem
from parallelize.base.user_code import innermost_module, is_user_code
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.uncaught_errors import publish_uncaught_errors
from parallelize.watchdog.call_gate import COLLECTIVES_DIFFER, CallGate
from parallelize.watchdog.call_log import CallLog
from parallelize.watchdog.call_patches import Undo, record_calls
from parallelize.watchdog.rank_state import line_of, rank_state
from parallelize.watchdog.store_channel import LOST, StoreChannel
from parallelize.watchdog.verdict import crash_file, remove_if_empty, write_state
from parallelize.watchdog.watch_thread import COLLECT_S, GRACE_S, WatchedRank, WatchThread

TIMEOUT_S = 300.0
_FOLLOWING = ("peer-lost", "rank-lost", "ranks-missing")
"""Slugs of errors that follow from what another rank did."""
_TRANSPORT_TEXTS = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "gloo/transport",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "[c10d]",
)

_STACK_LINES = 24
_LAST_S = 2.0
"""How long rank 0, whose process may have the store, waits at the end for the ranks that are slower."""

_open: Watch | None = None


def watch(
    mesh: DeviceMesh | None = None, *, timeout_s: float = TIMEOUT_S, folder: str | os.PathLike = "watch-reports"
) -> Watch:
    """Watch this rank and tell the others of it, from now on, in a thread of its own. Call it on every rank, once,
    early.

    When a rank dies, raises, hangs, leaves the loop or calls other collectives than the rest, every other rank ends,
    within `timeout_s` + 5 s, and prints who it was and what each group was waiting for. An error reaches the other
    ranks at once. On gloo, collectives that ranks call with another shape, dtype, module or kind are refused before
    they are sent.

    Args:
        mesh: names the groups of messages by its axes. Default: the meshes of the models that are called.
        timeout_s: how long a rank may wait in one collective. Longer than the longest time that one rank alone needs
            between two collectives, and shorter than the timeout of the process groups, in seconds.
        folder: gets a file `rank-N.json` of each rank when a run is ended, for `parallelize diagnose`.

    Returns: the open watch, a context manager. An error that leaves its block ends the run. Without processes, or with
        one, it does nothing.
    Raises: ModelError `watch-open` where this process has an open watch. HandshakeError `collectives-differ` from a
        collective. Other ranks end with exit status 70, and the rank with the error with 1.
    Cost: 2 us a collective, 20 us with cold caches; on gloo, 0.5 ms for each collective that no earlier step called at
        this point; two messages of the store at most every 0.05 s.
    """
    global _open
    if _open is not None:
        raise ModelError(Problem("watch-open", "this process has an open watch", fix="close() it first; one is enough"))
    _open = Watch(mesh, timeout_s, Path(folder))
    return _open


class Watch:
    """An open watch; made by `watch`.

    Args:
        mesh, timeout_s, folder: see `watch`.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout_s: float, folder: Path):
        self._thread: WatchThread | None = None
        self._undo: list[Undo] = []
        self._reported: BaseException | None = None
        self._pid = os.getpid()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        if dist.get_backend() in ("fake", "threaded"):
            return
        log = CallLog(mesh=MeshView.of(mesh) if mesh is not None else None)
        channel = StoreChannel(dist.get_rank(), dist.get_world_size())
        gate = CallGate(channel, log)
        log.compare = gate.check
        watched = WatchedRank(channel, log, gate, folder.absolute(), timeout_s)
        self._watched = watched
        self._undo = [record_calls(log), self._catch_uncaught(), self._write_crashes()]
        self._thread = WatchThread(watched)
        with suppress(*LOST):
            self._thread.beat()  # a rank that ends before the thread's first iteration has opened a watch
        self._thread.start()
        atexit.register(self.close)

    @property
    def watched(self) -> WatchedRank | None:
        """What its thread works on; None where nothing is watched."""
        return self._watched if self._thread is not None else None

    @property
    def thread(self) -> WatchThread | None:
        """The thread; None where nothing is watched."""
        return self._thread

    def add(self, model: nn.Module) -> None:
        """Name the modules of a model, also before it is called and where its modules are called by themselves.

        Args:
            model: the root.
        """
        if self._thread is not None:
            self._watched.log.names.add(model)

    def close(self) -> None:
        """End the watch, tell the other ranks that this one has left the loop, and restore what was replaced."""
        global _open
        if _open is self:
            _open = None
        atexit.unregister(self.close)
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        watched = self._watched
        watched.gate.closed = True
        if watched.error is None:
            state = rank_state(watched.log, thread.standing, watched.channel.rank, watched.channel.size)
            with suppress(*LOST):
                watched.channel.post("left", state=state | {"status": "left", "stack": [], "waiting": None})
                thread.wait_for_the_others(_LAST_S)
            thread.stop()
            for undo in reversed(self._undo):
                undo()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._report(error)
        else:
            self.close()

    # -- errors -------------------------------------------------------------------------------------------------------

    def _report(self, error: BaseException) -> None:
        """Tell the other ranks of an error; where it follows from another rank's, end as they do."""
        thread, watched = self._thread, getattr(self, "_watched", None)
        if thread is None or watched is None or self._reported is error or os.getpid() != self._pid:
            return
        self._reported = error
        follows = follows_from_another_rank(error)
        description = described(error, watched.log)
        with watched.ending:  # the thread that has it ends the process
            watched.error = description | {"follows": follows}
        watched.gate.closed = True
        if follows:
            thread.write_early()
            with suppress(*LOST):
                watched.channel.post("alarm")
            thread.join(GRACE_S + COLLECT_S + 4.0)  # it ends the process
            thread.end_run(0.0)
        state = rank_state(watched.log, thread.standing, watched.channel.rank, watched.channel.size)
        state |= {"status": "failed", "error": description, "stack": description["stack"], "time": time.time()}
        with suppress(*LOST):
            watched.channel.set(f"state/{watched.channel.rank}", state)
            watched.channel.post("error")
            watched.channel.set(f"done/{watched.channel.rank}", True)
        with suppress(OSError):
            write_state(watched.folder, state | {"run": thread.run_name()})
        remove_if_empty(crash_file(watched.folder, watched.channel.rank))

    def _catch_uncaught(self) -> Undo:
        publish_uncaught_errors()  # inside this hook, which reads all lines of the traceback before they are left out
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() != self._pid or self._thread is None:
                previous(kind, error, trace)
                return
            self._report(error)
            previous(kind, error, trace)
            self._end_failed()

        sys.excepthook = hook

        def undo() -> None:
            if sys.excepthook is hook:
                sys.excepthook = previous

        return undo

    def _end_failed(self) -> None:
        """End this process after its error was printed, without the destructors of process groups, which may abort
        it."""
        if self._thread is not None:
            self._thread.wait_for_readers(range(self._watched.channel.size))
        atexit.unregister(self.close)
        with suppress(Exception):
            atexit._run_exitfuncs()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def _write_crashes(self) -> Undo:
        """Where the interpreter crashes (SIGSEGV, SIGABRT), or its lock is not released, it writes the Python
        stacks."""
        watched = self._watched
        path = crash_file(watched.folder, watched.channel.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = watched.crashes = path.open("w")
        enabled = not faulthandler.is_enabled()
        if enabled:
            faulthandler.enable(file)

        def undo() -> None:
            faulthandler.cancel_dump_traceback_later()
            if enabled:
                faulthandler.disable()
            file.close()
            remove_if_empty(path)
            with suppress(OSError):
                path.parent.rmdir()  # where nothing was written

        return undo


def name_in_watch(model: nn.Module) -> None:
    """Name the modules of a model in the open watch, if there is one."""
    if _open is not None:
        _open.add(model)


@contextmanager
def telling_of(error: BaseException | None) -> Iterator[None]:
    """While ranks exchange whether one of them failed: let the watch tell the error of this rank to those that never
    get here, because they wait for this rank in a collective that it has not called.

    Raises: the error itself, where the watch finds that another rank is in another collective.
    """
    watched = None if _open is None or error is None else _open.watched
    if watched is None or error is None:
        yield
        return
    watched.handled = described(error, watched.log) | {"follows": follows_from_another_rank(error)}
    try:
        yield
    except HandshakeError as difference:
        raise error if COLLECTIVES_DIFFER in difference.slugs else difference from None
    finally:
        watched.handled = None


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether an error says only that another rank did not answer."""
    if isinstance(error, ParallelizeError):
        return any(slug in _FOLLOWING for slug in error.slugs)
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TRANSPORT_TEXTS)


def described(error: BaseException, log: CallLog) -> dict[str, Any]:
    """An error as plain data: its text, the module and the line of the user's code that raised it, its stack."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    entries = traceback.extract_tb(error.__traceback__)
    place = next((line_of(entry) for entry in reversed(entries) if is_user_code(entry.filename)), "")
    module = innermost_module(error, log.names.names)
    lines = [line for entry in traceback.format_tb(error.__traceback__) for line in entry.rstrip().splitlines()]
    problems = problems_as_data(error) if isinstance(error, ParallelizeError) else []
    return {"text": text, "module": module, "place": place, "stack": lines[-_STACK_LINES:], "problems": problems}


def problems_as_data(error: ParallelizeError) -> list[Any]:
    """The problems of an error as they are sent, without their fields of where."""
    return [
        [problem.slug, problem.what, [list(row) for row in problem.rows], problem.fix] for problem in error.problems[:4]
    ]
