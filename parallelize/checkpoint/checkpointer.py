"""`Checkpointer`: the checkpoints of one run, in one folder."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.checkpoint import disk, folders
from parallelize.checkpoint.about import about_run
from parallelize.checkpoint.held import bare, placed
from parallelize.checkpoint.load import Loading, load_run
from parallelize.checkpoint.meeting import TIMEOUT_S, Meeting, known, restored, told
from parallelize.checkpoint.save import write_snapshot
from parallelize.checkpoint.snapshot import Run, Snapshot, Staging, take
from parallelize.errors import CheckpointError, Problem
from parallelize.progress_line import Progress
from parallelize.randomness.streams import Streams

if TYPE_CHECKING:
    from parallelize.training import ParallelModel

Named = Mapping[str, Any] | Any | None


class Checkpointer:
    """Saves a run and resumes it, on whatever mesh it goes on.

        with Checkpointer("runs/a", model, optimizer=optimizer, scheduler=scheduler, keep_last=3) as checkpoints:
            for step in range(checkpoints.resume(), steps):
                ...
                if (step + 1) % 100 == 0:
                    checkpoints.save(step + 1)

    Build it on every rank, after the model was wrapped and the optimiser built. `save`, `resume`, `wait` and `close` are
    collectives. A folder has one writer at a time.

    Args:
        folder: on a file system that all ranks see; that is tried at once.
        model: a `ParallelModel`, or a module on any or no mesh.
        optimizer, scheduler: one, or several by name.
        streams: `Streams` whose numbers go on. data: an object with `state_dict` and `load_state_dict` that knows the
            position in the data (`GlobalBatches`); each data rank's is kept. user: more such objects by name; every rank is
            asked, the first one's state is kept.
        mesh: of all processes, where the model does not know it.
        asynchronous: `save` returns when the state is copied; files are written beside training. Errors of that are raised by
            the next call.
        keep_last, keep_every: retention: the last n, and those whose step is a multiple of k. None: all.
        generators: torch's, Python's and NumPy's own generators are saved and restored too.
        timeout_s: how long ranks wait for each other.

    Raises: CheckpointError `not-shared`, `folder-in-use`; ModelError `partial-mesh`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        model: ParallelModel | nn.Module,
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        scheduler: Named = None,
        streams: Streams | None = None,
        data: Any = None,
        user: Mapping[str, Any] | None = None,
        mesh: DeviceMesh | None = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        generators: bool = True,
        timeout_s: float = TIMEOUT_S,
    ):
        _check_retention(keep_last, keep_every)
        self.root = Path(folder).absolute()
        self.run = run_of(model, optimizer, scheduler, streams, data, user, generators)
        _, self.place = placed(model, mesh)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.values: Any = None
        self._staging = Staging() if asynchronous else None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._lock: folders.Lock | None = None
        self._meeting = Meeting(self.place.mesh, timeout_s)
        try:
            self._take_folder()
        except BaseException:
            self._meeting.close()
            raise

    # -- the folder -----------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """The first rank locks the folder and clears what was cut off; every rank sees that it is the same folder."""
        token = uuid.uuid4().hex
        try:
            self._by_the_first(lambda: self._lock_folder(token))
            token = self._meeting.share(token)
            seen = self._meeting.all((self.root / f".shared-{token}").is_file())
            blind = [self._meeting.ranks[place] for place, one in enumerate(seen) if not one]
            if blind:
                what = f"ranks {blind[:12]} do not see the files that rank {self._meeting.ranks[0]} writes"
                fix = "save to a file system that all machines share"
                raise CheckpointError(Problem("not-shared", what, str(self.root), fix=fix))
        except BaseException:
            self._release(token)
            raise
        self._by_the_first(lambda: self._forget_token(token))

    def _lock_folder(self, token: str) -> None:
        self._lock = folders.Lock(self.root)
        with disk.explained(self.root):
            for path in folders.unfinished(self.root):
                disk.remove_folder(path)
            disk.write_file(self.root / f".shared-{token}", token.encode())

    def _forget_token(self, token: str) -> None:
        with disk.explained(self.root):
            disk.remove_file(self.root / f".shared-{token}")

    def _release(self, token: str = "") -> None:
        if self._lock is not None:
            if token:
                with contextlib.suppress(OSError):
                    disk.remove_file(self.root / f".shared-{token}")
            self._lock.release()
            self._lock = None

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, values: Any = None) -> None:
        """Save the state as it is now.

        Args:
            step: of training; also the folder's name. values: anything plain to keep beside it: `resume` leaves it in
                `values` (the first rank's).

        Raises: CheckpointError, on every rank; what was saved before is untouched. In the background: at the next call.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(Problem("bad-step", f"{step!r} is no step", fix="give a whole number, 0 or more"))
        self.wait()
        self._by_the_first(lambda: folders.check_newest(self.root, step))
        snapshot, error = None, None
        about: dict[str, Any] = {}
        try:
            snapshot = take(self.run, self.place, step, values, self._staging)
            about = about_run(self.place) if self._meeting.leads else {}
        except Exception as found:
            error = known(found)
        self._meeting.agree(error)
        assert snapshot is not None
        if self._staging is None:
            self._write(snapshot, about)
            return
        self._thread = threading.Thread(target=self._write_beside, args=(snapshot, about), name="checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot, about: dict[str, Any]) -> None:
        write_snapshot(self.root, snapshot, self._meeting, about)
        self._by_the_first(self._retain)

    def _by_the_first(self, work: Callable[[], None]) -> None:
        """Something that the first rank does alone; its failure is every rank's."""
        error = None
        if self._meeting.leads:
            try:
                work()
            except Exception as found:
                error = known(found)
        self._meeting.agree(error)

    def _write_beside(self, snapshot: Snapshot, about: dict[str, Any]) -> None:
        try:
            self._write(snapshot, about)
        except BaseException as error:  # raised by the next call, on the caller's thread
            self._failed = error

    def wait(self) -> None:
        """Wait for a save in the background. Raises: what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    @property
    def saving(self) -> bool:
        """Whether a save goes on in the background."""
        return self._thread is not None and self._thread.is_alive()

    def _retain(self) -> None:
        steps = folders.published(self.root)
        for step in folders.surplus(list(steps), self.keep_last, self.keep_every):
            with disk.explained(steps[step]):
                folders.remove(steps[step])

    # -- loading --------------------------------------------------------------------------------------------------

    def resume(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        check: bool = True,
        set_aside: bool = False,
    ) -> int:
        """Load the newest checkpoint, or that of `step`. Where there is none yet, nothing happens.

        Args:
            strict, cast, check: see `load_checkpoint`.
            set_aside: with `step`: rename newer checkpoints, whose steps are about to be saved again.

        Returns: the step at which training goes on: 0 where there is none.
        Raises: CheckpointError, on every rank, before anything is changed.
        """
        self.wait()
        folder = self._meeting.share(self._chosen(step, set_aside) if self._meeting.leads else None)
        if isinstance(folder, list):
            raise CheckpointError(*(restored(problem, self._meeting.ranks[0]) for problem in folder))
        if folder is None:
            return 0
        loading = self._load(self.root / folder, strict, cast, check)
        self.values = loading.values
        if not set_aside:
            return loading.manifest.step
        self._by_the_first(lambda: folders.set_aside(self.root, loading.manifest.step))
        return loading.manifest.step

    def _load(self, folder: Path, strict: bool, cast: bool, check: bool) -> Loading:
        with Progress("loading", self._meeting.leads) as progress:
            return load_run(
                folder, self.run, self.place, self._meeting, strict=strict, cast=cast, check=check, progress=progress
            )

    def _chosen(self, step: int | None, set_aside: bool) -> Any:
        """A folder's name, None, or problems."""
        there = folders.published(self.root)
        if step is None and not there:
            return None
        try:
            chosen = folders.resolve(self.root, step)
            newer = [str(one) for one in there if step is not None and one > step]
            if newer and not set_aside:
                what = f"steps {', '.join(newer[:6])} were saved after {step}, and would be in the way of what comes"
                fix = "resume(step, set_aside=True) renames them; or use another folder"
                raise CheckpointError(Problem("newer-checkpoints", what, str(self.root), fix=fix))
            return chosen.name
        except CheckpointError as error:
            return told(error)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a save in the background, and let the folder go. Raises: what that save raised."""
        try:
            self.wait()
        finally:
            self._release()
            self._meeting.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            error.__notes__ = [*getattr(error, "__notes__", []), f"and a save in the background failed: {late}"]

    def __del__(self) -> None:
        failed = getattr(self, "_failed", None)
        if failed is not None:
            print(f"a checkpoint was not saved, and nobody asked: {failed}")


def _check_retention(keep_last: int | None, keep_every: int | None) -> None:
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            fix = "give a whole number, 1 or more; None keeps all"
            raise CheckpointError(Problem("bad-retention", f"{name} is {value!r}", fix=fix))
    if keep_every is not None and keep_last is None:
        fix = "give keep_last too: how many of the newest stay beside every k-th"
        raise CheckpointError(Problem("bad-retention", "keep_every alone removes nothing", fix=fix))


def run_of(
    model: ParallelModel | nn.Module,
    optimizer: Any,
    scheduler: Any,
    streams: Streams | None,
    data: Any,
    user: Mapping[str, Any] | None,
    generators: bool,
) -> Run:
    """What belongs together. Raises: CheckpointError `not-stateful` for an object without a state to save."""
    for name, one in [("data", data), *(user or {}).items()]:
        if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            what = f"{name} is a {type(one).__name__}, which has no state_dict and load_state_dict"
            raise CheckpointError(Problem("not-stateful", what, fix="pass plain values as save(step, values=...)"))
    plain = isinstance(model, nn.Module)
    given: Any = model
    return Run(
        bare(given if plain else given.module),
        None if plain else given.pipeline,
        _by_name(optimizer, "optimizer"),
        _by_name(scheduler, "scheduler"),
        streams,
        data,
        dict(user or {}),
        generators,
    )


def _by_name(given: Any, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {name: given}
    for called in found:
        if "/" in called or called in ("model", "state"):
            what = f"{called!r} cannot be the name of an optimiser or scheduler"
            raise CheckpointError(Problem("bad-name", what, fix="use another name"))
    return found


def load_checkpoint(
    folder: str | os.PathLike,
    model: ParallelModel | nn.Module,
    *,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    scheduler: Named = None,
    step: int | None = None,
    mesh: DeviceMesh | None = None,
    strict: bool = True,
    cast: bool = False,
    check: bool = True,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Load weights, and what else is given, of a checkpoint into a model on any mesh: for serving, or to fine-tune from.

    A collective over all processes. A model on meta is allocated first, and filled in place.

    Args:
        folder: of a step, or of a run: then the newest, or `step`.
        strict: a missing or unexpected tensor is an error. cast: dtypes may lose precision (float32 weights into bfloat16).
        check: compare the hash of everything that is read.

    Returns: the checkpoint's step.
    Raises: CheckpointError with file and tensor, on every rank, before anything is changed.
    """
    _, place = placed(model, mesh)
    run = run_of(model, optimizer, scheduler, None, None, None, False)
    meeting = Meeting(place.mesh, timeout_s, beside=False)
    try:
        error, path = None, None
        try:
            path = folders.resolve(folder, step)
        except CheckpointError as found:
            error = found
        meeting.agree(error)
        assert path is not None
        options: dict[str, Any] = {"strict": strict, "cast": cast, "check": check, "progress": progress}
        return load_run(path, run, place, meeting, **options).manifest.step
    finally:
        meeting.close()
