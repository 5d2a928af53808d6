"""The loop of a run: one step after another, with what is logged, saved, judged, and the request to stop, at each
boundary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.axes.tensor.experts.routing_load import ExpertLoad
from parallelize.base.errors import GradientError, Problem
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.stopping import Stopping
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.config.run_config_file import naming
from parallelize.launch.emit.launch_files import save_time_file
from parallelize.launch.loop.anomalies import GOES_ON, Anomaly, AnomalyWatch, largest_gradient, source_of_nonfinite
from parallelize.launch.loop.memory_report import used_bytes
from parallelize.launch.loop.profiled_step import ProfiledStep, compare_ranks, profiled
from parallelize.launch.loop.resumed_run import differences_of, refuse_or_tell
from parallelize.launch.loop.run_data import RunData
from parallelize.launch.loop.run_metrics import RunMetrics
from parallelize.launch.loop.run_optimizer import FileOptions
from parallelize.state.randomness.dropout.install import dropout_clock

Watching = Callable[[], AbstractContextManager[Any]]


@dataclass
class TrainLoop:
    """A run that is ready to train. `run` is called on every rank.

    Attributes:
        device: of this rank, such as cuda:3. tell: prints a line on rank 0.
        watching: entered around the whole loop: the place of a watchdog.
    """

    config: RunConfig
    parallel: ParallelModel
    data: RunData
    optimizer: Optimizer
    schedule: LambdaLR
    metrics: RunMetrics
    stopping: Stopping
    checkpoints: Checkpointer | None
    device: str
    tell: Callable[[str], None]
    anomalies: AnomalyWatch
    options: FileOptions
    watching: Watching = nullcontext
    saved_step: int = -1
    profile: ProfiledStep | None = field(default=None)
    load: ExpertLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = ExpertLoad(self.parallel.module)

    def run(self) -> int:
        """Train to the last step, or until all ranks stop. Returns: the exit status.

        Raises: GradientError `nonfinite-step`, `loss-spike`, and what steps and saves raise.
        """
        with self.watching():
            step = self._resume()
            while step < self.config.steps:
                step = self._step(step)
                if self._saves_at(step):
                    self._save(step)
                if self.stopping.stops([used_bytes(self.device)]):
                    self._stop(step)
                    break
            if self.checkpoints is not None and step > self.saved_step:
                self._save(step)
            self.parallel.check_ties()
        return self.stopping.exit_status

    # -- a step ---------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> int:
        """One optimizer step. Returns: the number of the next one, which is an earlier one after going back."""
        with naming(self.config, "data"):
            batch = self.data.next()
        began = time.perf_counter()
        with self._profiling(step) as profile, self.load.counting():
            loss = float(self.parallel.step(**batch))
        norm = float(self.parallel.clip_grad_norm_(self.config.optimizer.clip or float("inf")))
        anomaly = self.anomalies.judge(step, loss, norm)
        if anomaly is not None and (back := self._answer(anomaly, batch, step)) is not None:
            return back
        if anomaly is None or anomaly.action in GOES_ON:
            self.optimizer.step()
        self.optimizer.zero_grad()
        rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        if profile is not None:
            compare_ranks(profile)
            self.profile = profile
        took = time.perf_counter() - began
        self.metrics.log(step, loss, norm, rate, took, self._memory_bytes(), profile, self.load.scalars())
        return step + 1

    def _profiling(self, step: int) -> AbstractContextManager[ProfiledStep | None]:
        """Around the second step and every N-th: the first has allocations and first-time checks."""
        every = self.config.metrics.profile_every
        if not every or (step % every != 1 and every > 1):
            return nullcontext()
        return profiled(self.parallel.module, self.parallel.mesh)

    def _memory_bytes(self) -> float:
        """Of the rank with the most, as of the boundary before: it came with the request to stop."""
        return max(self.stopping.agreement.largest[0], used_bytes(self.device))

    # -- anomalies ------------------------------------------------------------------------------------------------

    def _answer(self, anomaly: Anomaly, batch: dict[str, Any], step: int) -> int | None:
        """Name the source, and do what the file says. Returns: the step to go back to. Raises: GradientError."""
        named = (
            source_of_nonfinite(self.parallel, batch)
            if anomaly.kind == "nonfinite"
            else largest_gradient(self.parallel)
        )
        self.tell(f"{anomaly.what}: {named} ({anomaly.action})")
        if anomaly.action == "stop" or self.anomalies.too_many:
            fix = "anomalies: {nonfinite: skip} leaves such steps out, `rewind` goes back to the last checkpoint"
            what = (
                anomaly.what
                if anomaly.action == "stop"
                else f"{anomaly.what}; it is number {self.anomalies.num_anomalies}"
            )
            slug = "nonfinite-step" if anomaly.kind == "nonfinite" else "loss-spike"
            raise GradientError(Problem(slug, what, rows=(("source", named),), fix=fix))
        if anomaly.action != "rewind" or self.checkpoints is None:
            return None
        if self.saved_step < 0:
            self.tell("there is no checkpoint to go back to yet: the step is skipped")
            return None
        self.optimizer.zero_grad()
        position = self.data.batches.state_dict()
        back = self._restore(self.checkpoints)
        self.data.batches.load_state_dict(position)  # the data that led here are not seen again
        self.data.restart()
        self.tell(f"gone back to step {back}; the data go on after the batch of step {step}")
        return back

    # -- checkpoints and the end ----------------------------------------------------------------------------------

    def _resume(self) -> int:
        if self.checkpoints is None:
            return 0
        new_optimizer = self._compare(self.checkpoints)
        step = self._restore(self.checkpoints, new_optimizer)
        self.saved_step = step if step else -1
        self.data.restart()
        if step:
            self.tell(f"resumed at step {step} from {self.config.checkpoints.folder}")
        expected_s = self.checkpoints.expected_save_s()
        self.tell(f"save: about {expected_s:.1f} s (estimate); a signal leaves {self.config.grace_s} s")
        if warning := self.stopping.compare(expected_s, "estimated"):
            self.tell(f"warning: {warning}")
        return step

    def _compare(self, checkpoints: Checkpointer) -> bool:
        """Compare the file with the newest checkpoint. Returns: whether the optimizer's state begins anew.

        Raises: LaunchError `changed-key`.
        """
        manifest = checkpoints.newest()
        if manifest is None:
            return False
        where = f"the checkpoint at step {manifest.step} of {self.config.checkpoints.folder}"
        differences = differences_of(self.config, manifest, self.parallel, self.optimizer)
        refuse_or_tell(self.config, differences, where, self.tell)
        return any(each.key == "optimizer.name" for each in differences)

    def _restore(self, checkpoints: Checkpointer, new_optimizer: bool = False) -> int:
        """Load the newest checkpoint; what the file decides is again as it says. Returns: the step."""
        step = checkpoints.resume(new_optimizer=new_optimizer)
        with naming(self.config, "optimizer.args"):
            self.options.restore(self.optimizer, self.schedule)
        if (clock := dropout_clock(self.parallel.module)) is not None:
            clock.seed = self.config.seed
        return step

    def _saves_at(self, step: int) -> bool:
        return self.checkpoints is not None and step % self.config.checkpoints.every == 0 and step > self.saved_step

    def _save(self, step: int) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(step)
        self.saved_step = step
        self._note_save_time()

    def _note_save_time(self) -> None:
        """Of the save before, where it is in the background: for the launch files that `--emit` writes, and a
        warning."""
        assert self.checkpoints is not None
        if not self.checkpoints.save_s:
            return
        if warning := self.stopping.compare(self.checkpoints.save_s, "as the last one did"):
            self.tell(f"warning: {warning}")
        if is_first_rank():
            path = save_time_file(self.config)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"save_s": round(self.checkpoints.save_s, 3)}), encoding="utf-8")

    def _stop(self, step: int) -> None:
        """All ranks have agreed to stop after this step."""
        if self.checkpoints is not None:
            if step > self.saved_step:
                self._save(step)
            self.checkpoints.wait()
        name = self.stopping.signals.received or "a signal to another rank"
        saved = "saved" if self.checkpoints is not None else "without checkpoints, nothing is saved"
        self.tell(f"{name}: stopped after step {step}, {saved} {self.stopping.since_s:.1f} s after the signal")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
