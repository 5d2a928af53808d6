"""Model, data, optimizer, schedule, checkpoints and metrics of a run, on the mesh that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.agreement import problem_from_json, problems_to_json
from parallelize.base.errors import CheckpointError, DataError, LaunchError, ParallelizeError
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.stopping import Stopping
from parallelize.comm.mesh_view import MeshView
from parallelize.launch.config.resumed_keys import may_differ
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.config.run_config_file import naming
from parallelize.launch.loop.anomalies import AnomalyWatch
from parallelize.launch.loop.memory_report import used_bytes
from parallelize.launch.loop.resumed_run import RECORD, ChangedKey, record_of, refuse_or_tell
from parallelize.launch.loop.run_data import Names, argument_names, data_of
from parallelize.launch.loop.run_metrics import RunMetrics
from parallelize.launch.loop.run_optimizer import FileOptions, build_optimizer_of, build_schedule_of
from parallelize.launch.loop.train_loop import TrainLoop, is_first_rank
from parallelize.launch.preflight.base_model import prepared_base
from parallelize.launch.preflight.mesh_choice import ChosenMesh
from parallelize.launch.preflight.prediction import Summary
from parallelize.ops.matmul.calibrate import peak_flops
from parallelize.plan.models.model_source import ModelSource, read_model
from parallelize.plan.models.transformers_models import class_of
from parallelize.state.randomness.init.initialize import build_on_meta
from parallelize.training.apply_axes import parallelize_model
from parallelize.training.data.global_batches import GlobalBatches


@dataclass(frozen=True)
class RunEnvironment:
    """Where a run is built: what was chosen and predicted, and how it speaks.

    Attributes:
        device: of this rank, such as cuda:3. tell: prints a line on rank 0.
    """

    chosen: ChosenMesh
    mesh: DeviceMesh
    device: str
    predicted: Summary | None
    tell: Callable[[str], None]


def build_run(config: RunConfig, around: RunEnvironment, stack: ExitStack) -> TrainLoop:
    """A loop that is ready to run; `stack` closes what it opens. A collective."""
    stopping = Stopping(MeshView(around.mesh), config.grace_s, config.timeout_s, extras=1)
    stack.callback(stopping.close)
    parallel, num_parameters, names = build_model(config, around)
    with naming(config, "data"):
        microbatches = parallel.pipeline.schedule.num_microbatches
        data = data_of(config, names, around.mesh, around.device, _raise_together, microbatches)
    optimizer = build_optimizer_of(config, parallel)
    options = FileOptions.of(config.optimizer, optimizer)
    schedule = build_schedule_of(config, optimizer)
    anomalies = AnomalyWatch(config.anomalies)
    checkpoints = None
    section = config.checkpoints
    if section.folder:
        with naming(config, "checkpoints.folder"):
            checkpoints = Checkpointer(
                section.folder,
                parallel,
                optimizer=optimizer,
                scheduler=schedule,
                data=DataPosition(data.batches, config, around.tell),
                user={"anomalies": anomalies},
                shared=section.shared,
                asynchronous=section.asynchronous,
                keep_last=section.keep_last,
                keep_every=section.keep_every,
                about={RECORD: record_of(config)},
                timeout_s=config.timeout_s,
            )
        stack.enter_context(checkpoints)
    with naming(config, "metrics"):
        metrics = _metrics(config, around, num_parameters, data.tokens_per_step)
    stack.callback(metrics.close)
    return TrainLoop(
        config,
        parallel,
        data,
        optimizer,
        schedule,
        metrics,
        stopping,
        checkpoints,
        around.device,
        around.tell,
        anomalies,
        options,
    )


def _raise_together(error: ParallelizeError | None) -> None:
    """Raise on every rank the error of the first that has one. A collective. Raises: DataError."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else problems_to_json(error.problems))
    for rank, problems in enumerate(errors):
        if problems is not None:
            raise DataError(*(problem_from_json(fields, rank) for fields in problems)) from error


def build_model(config: RunConfig, around: RunEnvironment) -> tuple[ParallelModel, int, Names]:
    """The model on the mesh, the number of its parameters, and the names that a batch may have."""
    with naming(config, "model"):
        source, module, initialize = _module_of(config, around)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    names = argument_names(module)  # before the plan's forwards take any
    with naming(config, "mesh", "plan", "options"):
        parallel = parallelize_model(
            module,
            around.mesh,
            config.plan or None,
            around.chosen.options,
            device=around.device,
            initialize=initialize,
            dropout_seed=config.seed,
            **_loss_of(source),
        )
    return parallel, num_parameters, names


def _module_of(config: RunConfig, around: RunEnvironment) -> tuple[ModelSource, nn.Module, Any]:
    """(the source of the model, the model before its plan, where its values come from). A collective where there are
    adapters."""
    source = read_model(config.model.name, config.model.set)
    # the class itself, whose initialization is recorded; the source's own way of building leaves it out on meta
    build = class_of(source.config, source.text) if source.config is not None else source.make
    module = build_on_meta(build, source.config).train()
    return source, *prepared_base(module, config, around.mesh, around.device)


def _loss_of(source: ModelSource) -> dict[str, Any]:
    return {name: value for name, value in (("loss", source.loss), ("count", source.count)) if value is not None}


def _metrics(config: RunConfig, around: RunEnvironment, num_parameters: int, tokens: float) -> RunMetrics:
    enabled = is_first_rank()
    dtype = getattr(torch, around.chosen.options.complete().dtype or "float32")
    of_rows = tokens == config.data.global_batch * config.data.sequence  # for which a step is predicted
    flops = around.predicted.flops_per_step if around.predicted is not None and of_rows else 0.0
    peak = peak_flops(around.mesh.device_type, dtype, size=512, rounds=5) if enabled and flops else 0.0
    heading = f"{config.model.name}, {num_parameters:,} parameters, {around.chosen.mesh}"
    around.tell(heading)
    return RunMetrics(config, tokens, flops, peak * around.chosen.mesh.world_size, heading, enabled)


def note_peaks(loop: TrainLoop, around: RunEnvironment) -> None:
    """Put each rank's peak memory, and what was predicted, on the page. A collective."""
    mesh = around.mesh
    pp_rank = MeshView(mesh).index("pp")
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (pp_rank, used_bytes(around.device)))
    if loop.metrics.page is not None:
        for rank, (stage, measured) in enumerate(peaks):
            predicted = around.predicted.memory_of(stage).get("peak", 0) if around.predicted is not None else 0
            loop.metrics.page.peaks.append((f"rank {rank} (pp rank {stage})", measured, float(predicted)))
        if around.device == "cpu":
            loop.metrics.page.notes.append(
                "Measured memory on a CPU is that of the process, with Python and its libraries."
            )


def report_folder(config: RunConfig) -> Path:
    """Where ranks write what went wrong."""
    return Path(config.checkpoints.folder or ".") / "reports"


# -- data position ---------------------------------------------------------------------------------------------------
# The position in the data of a run, as checkpoints have it: compared with the file of a run that goes on from one.


_SOURCES = ("text", "jsonl", "field", "function", "args", "tokenizer", "sequence")
_STATES = "states"


class DataPosition:
    """What a checkpoint saves of the data.

    Args:
        batches: `GlobalBatches` or `IterableBatches`, of this data rank.
        config: the run.
        tell: prints a line on rank 0.
    """

    def __init__(self, batches: Any, config: RunConfig, tell: Callable[[str], None]):
        self.batches, self.config, self.tell = batches, config, tell

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The states of all data ranks of the saved run, as `load_state_dict` takes them."""
        return {_STATES: list(states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position. Where the file accepts that the data are others, they begin anew.

        Raises: LaunchError `changed-key`; CheckpointError `data-position`, which names the keys of the file. Nothing is
            changed then.
        """
        states = state[_STATES]
        if refuse_or_tell(self.config, list(self._differences(states[0])), "the checkpoint", self.tell):
            self.tell("the data begin anew")
            return
        try:
            if hasattr(self.batches, "merge_states"):
                self.batches.load_state_dict(self.batches.merge_states(states))
            else:
                self.batches.load_state_dict(states[0])
        except CheckpointError as error:
            self._refuse(error, states[0])

    def _differences(self, saved: Any) -> Iterator[ChangedKey]:
        """Of the order, and of the number of rows."""
        batches = self.batches
        if not isinstance(batches, GlobalBatches) or not isinstance(saved, dict):
            return
        for name in ("seed", "shuffle"):
            value = getattr(batches, name)
            if name in saved and saved[name] != value:
                yield ChangedKey(f"data.{name}", value, saved[name])
        rows = saved.get("num_samples", batches.num_samples)
        if rows != batches.num_samples:
            yield ChangedKey(self._key_of_sources(), f"of {batches.num_samples} rows", f"of {rows} rows")

    def _key_of_sources(self) -> str:
        """The key to name for other rows: any of the sources may be the reason, so it is the one that the file accepts,
        or the section."""
        accepted = self.config.checkpoints.may_differ
        return next((f"data.{name}" for name in _SOURCES if f"data.{name}" in accepted), "data")

    def _refuse(self, error: CheckpointError, saved: Any) -> None:
        """Raises: LaunchError with the problems of `error`, unless the file accepts them."""
        of_batch = isinstance(self.batches, GlobalBatches) and isinstance(saved, dict) and "num_samples" in saved
        key = "data.global_batch" if of_batch else self._key_of_sources()
        if may_differ(self.config.checkpoints.may_differ, key):
            self.tell(f"{key}: {error.problems[0].what}: accepted by checkpoints.may_differ; the data begin anew")
            return
        choice = f"checkpoints: {{may_differ: [{key}]}}, with which the data begin anew"
        place = self.config.place(key)
        problems = [replace(each, where=place, fix=f"{each.fix}; or {choice}") for each in error.problems]
        raise LaunchError(*problems) from error
