"""`Checkpointer`: the checkpoints of one run, in one folder."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.axes.pipeline.ties import ties_of
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.terminal.console import Progress
from parallelize.checkpoint.format.folders import KEY as NODES
from parallelize.checkpoint.format.manifest import Manifest, read_manifest
from parallelize.checkpoint.run.load import Loading, LoadOptions, load_run
from parallelize.checkpoint.run.local_tensors import model_on_mesh
from parallelize.checkpoint.run.metadata import run_metadata
from parallelize.checkpoint.run.node_files import shared_manifest
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.checkpoint.run.run_contents import Run, run_of
from parallelize.checkpoint.run.run_folder import RunFolder
from parallelize.checkpoint.run.save import expected_save_s, write_snapshot
from parallelize.checkpoint.run.snapshot import Snapshot, Staging, take
from parallelize.checkpoint.run.stop_signals import SIGNALS
from parallelize.checkpoint.run.stopping import Stopping
from parallelize.state.randomness.streams import Streams

if TYPE_CHECKING:
    from parallelize.axes.pipeline.parallel_model import ParallelModel

Named = Mapping[str, Any] | Any | None


class Checkpointer:
    """Saves a run, and resumes it on any mesh.

        with Checkpointer("runs/a", model, optimizer=optimizer, scheduler=scheduler, keep_last=3) as checkpoints:
            for step in range(checkpoints.resume(), steps):
                ...
                if (step + 1) % 100 == 0:
                    checkpoints.save(step + 1)

    Build it on every rank, after the model was wrapped and the optimizer was built. `save`, `resume`, `wait` and
    `close` are collectives. A folder has one writer at a time.

    Args:
        folder: a folder on a file system that all ranks see, which is checked at once; or, with `shared=False`, a
            folder of each node.
        model: a `ParallelModel`, or a module on any or no mesh.
        optimizer: one, or several by name.
        scheduler: one, or several by name.
        streams: random streams to save and restore.
        data: an object with `state_dict` and `load_state_dict` for the position in the data, such as `GlobalBatches`;
            the state of each data rank is saved.
        user: more such objects by name. Every rank's `state_dict` is called; the first rank's state is saved.
        mesh: the mesh of all processes, if the model has none.
        shared: all ranks see the folder. False: nodes have disks of their own. Ranks that see the same folder are one
            node, which keeps the files of its ranks. A checkpoint is published on all nodes or on none, and `resume`
            sends to each rank what its node lacks.
        asynchronous: `save` returns when the state is copied, and files are written in the background. The next call
            raises errors of the background save.
        keep_last: the number of newest checkpoints to keep. None: all.
        keep_every: with `keep_last`: also keep checkpoints whose step is a multiple of this.
        generators: save and restore the generators of torch, Python and NumPy too.
        about: values for JSON that describe the run, which join those of the manifest's `about`; `newest` reads them.
        timeout_s: how long ranks wait for each other, in seconds.

    Attributes:
        values: the `values` that were passed to `save`, of the checkpoint that was resumed.
        save_s: seconds that the last save took on this rank, its background included; 0 before the first.

    Raises: CheckpointError `not-shared`, `folder-in-use`, `folders-differ`, `bad-retention`, `bad-name`,
        `not-stateful`; ModelError `partial-mesh`, `wrapped-model`.
    Cost: each call sends short messages over a gloo group of its own. Tensors are sent only by `resume` with
        `shared=False`: otherwise each rank writes and reads files.
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
        shared: bool = True,
        asynchronous: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        generators: bool = True,
        about: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        _check_retention(keep_last, keep_every)
        self.root = Path(folder).absolute()
        self.run = run_of(
            model,
            optimizer=optimizer,
            scheduler=scheduler,
            streams=streams,
            data=data,
            user=user,
            generators=generators,
        )
        _, self.on_mesh = model_on_mesh(model, mesh)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.values: Any = None
        self._about = dict(about or {})
        self.save_s = 0.0
        self._saved_step = -1
        self._stopping: Stopping | None = None
        self._timeout_s = timeout_s
        self._staging = Staging() if asynchronous else None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._sync = RankSync(self.on_mesh.mesh, timeout_s)
        try:
            self._folder = RunFolder(self.root, self._sync, shared)
        except BaseException:
            self._sync.close()
            raise

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, values: Any = None) -> None:
        """Save the current state. A collective.

        Args:
            step: the training step, which also names the folder: an integer above that of every checkpoint in the
                folder.
            values: numbers, text, lists, dicts and tensors to save too. `resume` restores them as the attribute
                `values`. Those of the first rank are saved.

        Raises: CheckpointError `bad-step`, `already-saved`, `newer-checkpoints`, `unsavable-value` and other errors of
            the state, the files and the file system, on every rank; earlier checkpoints are unchanged. Errors in the
            background are raised by the next call. HandshakeError `ties-differ`, where copies of a tied parameter on
            two stages do: one of them would be saved.
        Cost: short messages, and no tensors. Of elements that several ranks store, one rank writes them. With
            `asynchronous`, the call first waits for the save before it, then copies this rank's elements to host
            memory.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(Problem("bad-step", f"{step!r} is not a step", fix="pass an integer, 0 or more"))
        self.wait()
        began = time.monotonic()
        self._folder.check_newest(step)
        snapshot, error = None, None
        about: dict[str, Any] = {}
        try:
            if (ties := ties_of(self.run.module)) is not None:
                ties.check()  # the copies of a tied parameter are saved once, so others would be lost
            snapshot = take(self.run, self.on_mesh, step, values, self._staging)
            about = self._metadata() if self._sync.is_coordinator else {}
        except Exception as caught:
            error = as_parallelize_error(caught)
        self._sync.agree(error)
        assert snapshot is not None
        self._saved_step = step
        if self._staging is None:
            self._write(snapshot, about, began)
            return
        arguments = (snapshot, about, began)
        self._thread = threading.Thread(target=self._write_in_background, args=arguments, name="checkpoint")
        self._thread.start()

    def _metadata(self) -> dict[str, Any]:
        nodes = self._folder.nodes
        return self._about | run_metadata(self.on_mesh) | ({NODES: nodes.metadata()} if nodes.several else {})

    def _write(self, snapshot: Snapshot, about: dict[str, Any], began: float) -> None:
        write_snapshot(self.root, snapshot, self._sync, about, nodes=self._folder.nodes)
        self.save_s = time.monotonic() - began
        self._folder.remove_surplus(self.keep_last, self.keep_every)

    def _write_in_background(self, snapshot: Snapshot, about: dict[str, Any], began: float) -> None:
        try:
            self._write(snapshot, about, began)
        except BaseException as error:  # raised by the next call, on the caller's thread
            self._failed = error

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises: the error of that save.
        Cost: nothing is sent but the messages of that save.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    @property
    def saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    # -- signals --------------------------------------------------------------------------------------------------

    def stop_on_signals(self, *, grace_s: float = 30.0, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        """From now on a signal to any rank is a request to stop, which `stops` answers. A collective, in the main
        thread.

        A second signal, two seconds later or more, ends the process at once; the last checkpoint is intact.

        Args:
            grace_s: seconds between the signal and the kill that follows it: 30 under torchrun and Kubernetes. A save
                that is expected to take longer, by the size of the state and the speed of the folder, is warned of now.
            signals: which ones.

        Raises: CheckpointError `not-main-thread`.
        Cost: one small file is written to the folder to measure its speed.
        """
        if self._stopping is None:
            self._stopping = Stopping(self.on_mesh.mesh, grace_s, self._timeout_s, signals=signals)
            self._stopping.compare(self.expected_save_s(), "estimated")

    def expected_save_s(self) -> float:
        """Seconds that a save takes: of the last one, else an estimate by the state's size and the folder's speed."""
        return self.save_s or expected_save_s(self.root, self.run)

    def stops(self, step: int, values: Any = None) -> bool:
        """Whether the run stops after this step, because a rank has got a signal; it is saved then. A collective.

            checkpoints.stop_on_signals(grace_s=120)      # once, before the loop
            if checkpoints.stops(step + 1):               # at the end of each step
                break
            sys.exit(checkpoints.exit_status)             # after the loop: 75 asks the scheduler to start it again

        Args:
            step, values: as `save` takes them.

        Returns: the same on every rank, at the same step.
        Raises: as `save`; CheckpointError `rank-lost`.
        Cost: one all_reduce of two numbers a step, which is not waited for where steps are shorter than 0.25 s: the
            answer comes one step later then.
        """
        if self._stopping is None:
            what = "stops() was called before stop_on_signals()"
            raise CheckpointError(Problem("no-signals", what, fix="call stop_on_signals once, before the loop"))
        if not self._stopping.stops():
            if self.save_s:
                self._stopping.compare(self.save_s, "as the last one did")
            return False
        if step > self._saved_step:
            self.save(step, values)
        self.wait()
        return True

    @property
    def exit_status(self) -> int:
        """What the script should end with: 0, or 75 where a signal has stopped the run."""
        return self._stopping.exit_status if self._stopping is not None else 0

    # -- loading --------------------------------------------------------------------------------------------------

    def newest(self) -> Manifest | None:
        """The manifest of the checkpoint that `resume` would load, whose `about` describes its run. A collective.

        Returns: None where there is no checkpoint.
        Raises: CheckpointError of the folder and of the manifest, on every rank; the error of an earlier save in the
            background.
        Cost: one small file is read.
        """
        self.wait()
        folder = self._folder.choose(None, False)
        if folder is None:
            return None
        if not self._folder.shared:
            return shared_manifest(folder, self._sync)
        manifest, error = None, None
        try:
            manifest = read_manifest(folder)
        except Exception as caught:
            error = as_parallelize_error(caught)
        self._sync.agree(error)
        return manifest

    def resume(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        check: bool = True,
        set_aside: bool = False,
        new_optimizer: bool = False,
        resize_vocabulary: bool = False,
    ) -> int:
        """Load the newest checkpoint, or that of `step`. Without `step`, an empty folder changes nothing. A collective.

        Learning rates and other options of an optimizer's groups, and the attributes of schedulers, are the saved ones,
        as after PyTorch's `load_state_dict`: what is to be another is set afterwards.

        Args:
            step: which checkpoint. None: the newest.
            strict: see `load_checkpoint`.
            cast: see `load_checkpoint`.
            check: see `load_checkpoint`.
            set_aside: with `step`: rename newer checkpoints, because their steps will be saved again.
            new_optimizer: leave optimizers as they are, such as of another class than the saved ones.
            resize_vocabulary: see `load_checkpoint`.

        Returns: the step at which training continues; 0 if there is no checkpoint.
        Raises: CheckpointError `no-checkpoint`, `newer-checkpoints` and those of `load_checkpoint`, on every rank,
            before anything is changed; also the error of an earlier save in the background.
        Cost: as `load_checkpoint`.
        """
        self.wait()
        folder = self._folder.choose(step, set_aside)
        if folder is None:
            return 0
        run = replace(self.run, optimizers={}) if new_optimizer else self.run
        loading = self._load(folder, run, LoadOptions(strict, cast, check, resize_vocabulary))
        self.values = loading.values
        if set_aside:
            self._folder.set_aside(loading.manifest.step)
        return loading.manifest.step

    def _load(self, folder: Path, run: Run, options: LoadOptions) -> Loading:
        with Progress("loading", self._sync.is_coordinator) as progress:
            options = replace(options, progress=progress)
            return load_run(folder, run, self.on_mesh, self._sync, options, shared=self._folder.shared)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a save in the background, and unlock the folder.

        Raises: the error of that save.
        Cost: nothing is sent but the messages of that save.
        """
        try:
            self.wait()
        finally:
            if self._stopping is not None:
                self._stopping.close()
            self._folder.release()
            self._sync.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            error.__notes__ = [*getattr(error, "__notes__", []), f"a save in the background failed too: {late}"]

    def __del__(self) -> None:
        failed = getattr(self, "_failed", None)
        if failed is not None:
            what = f"a checkpoint was not saved, and the error was not raised by a later call: {failed}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def _check_retention(keep_last: int | None, keep_every: int | None) -> None:
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            fix = "pass an integer, 1 or more; None keeps all"
            raise CheckpointError(Problem("bad-retention", f"{name} is {value!r}", fix=fix))
    if keep_every is not None and keep_last is None:
        fix = "pass keep_last too: how many of the newest are kept besides every k-th"
        raise CheckpointError(Problem("bad-retention", "keep_every alone removes nothing", fix=fix))
