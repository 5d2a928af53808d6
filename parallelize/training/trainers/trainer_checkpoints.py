"""The checkpoints of a `ParallelTrainer`: the stock folders, with a `Checkpointer`'s in each for what resumes a run.

out/checkpoint-20/
  model.safetensors, config.json, tokenizer, trainer_state.json    as the stock Trainer writes them
  parallel/step-00000020/                                          weights, optimizer, scheduler: any mesh loads them
  global_batches.json                                              the order of the data
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.base.errors import CheckpointError, Problem, warn_caller
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.hub.adapter_folder import has_adapters, read_adapters, save_adapter
from parallelize.checkpoint.hub.export import save_pretrained
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from parallelize.comm.handshake import agree_on
from parallelize.state.randomness.generators import random_state, set_random_state
from parallelize.training.trainers.trainer_loaders import MicroBatches

PARALLEL = "parallel"
"""The folder of the Checkpointer in each checkpoint."""
BATCHES = "global_batches.json"
_STATE = "trainer_state.json"  # the stock Trainer writes it last


class TrainerCheckpoints:
    """The methods of the stock Trainer that save and load. All are collectives."""

    parallel: Any
    args: Any
    state: Any
    accelerator: Any
    lr_scheduler: Any
    train_batches: MicroBatches | None
    stepped_optimizer: Any = None
    _random_state: Any = None  # of the checkpoint that was resumed

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; True resumes from the newest checkpoint that is complete.

        Raises: CheckpointError `no-checkpoint`.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(_newest(Path(self.args.output_dir)))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config and tokenizer into a folder, which `from_pretrained` loads. Every rank must call it."""
        stock: Any = self
        folder = Path(output_dir or self.args.output_dir)
        write_weights(self.parallel, folder)
        if self.args.should_save:
            processing = stock.processing_class or getattr(stock.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            stock.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._checkpoints(Path(output_dir)) as checkpoints:
            checkpoints.save(self.state.global_step)
        if self.args.should_save and self.train_batches is not None:
            Path(output_dir, BATCHES).write_text(json.dumps(self.train_batches.order(), indent=2))

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: the Checkpointer has saved it."""

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: the Checkpointer has saved it."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: the Checkpointer has loaded it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights of a folder that has nothing else; those of a checkpoint are loaded with the optimizer's state."""
        if not _is_resumable(Path(resume_from_checkpoint)):
            read_weights(self.parallel, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_resumable(Path(checkpoint)):
            return
        _compare_batches(Path(checkpoint, BATCHES), self.train_batches)
        with self._checkpoints(Path(checkpoint)) as checkpoints:
            checkpoints.resume()
        self._random_state = random_state()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The generators as they were saved, once the batches before have been skipped."""
        if self._random_state is not None:
            set_random_state(self._random_state)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if _is_resumable(folder):
            load_checkpoint(folder / PARALLEL, self.parallel)
        else:
            read_weights(self.parallel, folder)

    def _checkpoints(self, folder: Path) -> Checkpointer:
        scaler = getattr(self.accelerator, "scaler", None)
        return Checkpointer(
            folder / PARALLEL,
            self.parallel,
            optimizer=self.stepped_optimizer,
            scheduler=self.lr_scheduler,
            user={} if scaler is None else {"scaler": scaler},
        )


def _is_resumable(folder: Path) -> bool:
    """Whether a checkpoint has the state of an optimizer. `save_only_model` leaves it out."""
    return bool(folders.published(folder / PARALLEL))


def _newest(output_dir: Path) -> Path:
    """The newest complete checkpoint. Raises: CheckpointError `no-checkpoint`."""
    steps: dict[int, Path] = {}
    for path in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and (path / _STATE).is_file():
            steps[int(match.group(1))] = path
    for step in sorted(steps, reverse=True):
        with suppress(ValueError):  # of a file that a crash has cut off
            json.loads((steps[step] / _STATE).read_text())
            return steps[step]
    what = "there is no complete checkpoint in the folder"
    raise CheckpointError(Problem("no-checkpoint", what, str(output_dir), fix="train() without resume_from_checkpoint"))


def _compare_batches(saved: Path, batches: MicroBatches | None) -> None:
    """Refuse to resume on other global batches: the stock Trainer counts batches to find its position in the data.

    Of a checkpoint from before the order of samples was the stock one, sizes are compared, with a warning.

    Raises: CheckpointError `data-position`.
    """
    if batches is None or not saved.is_file():
        return
    state, here = json.loads(saved.read_text()), batches.order()
    if "sampling" not in state:
        here = {name: here[name] for name in ("global_batch_size", "num_samples")}
        warn_caller(
            f"{saved} is of an earlier version, whose epochs had another order: in the epoch that goes on now some "
            "samples come twice and others not at all"
        )
    differing = [name for name in here if state.get(name) != here[name]]
    if differing:
        rows = tuple((name, f"{state.get(name)} was saved, {here[name]} is set") for name in differing)
        fix = "the same data, seed and MyTrainer(..., global_batch_size=...); or train from the weights alone"
        what = "the global batches of this run are not those of the checkpoint"
        raise CheckpointError(Problem("data-position", what, str(saved), rows=rows, fix=fix))


# -- trainer weights -------------------------------------------------------------------------------------------------
# Weights of a trainer's model in the format of `transformers`, in a folder that may have other files.


_WRITING = ".weights-being-written"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def write_weights(parallel: Any, folder: Path) -> None:
    """Write weights and config into a folder, in place of earlier ones. A collective; all ranks write.

    Of a model with adapters, these alone: see `save_adapter`.

    Raises: CheckpointError as `save_pretrained` or `save_adapter`.
    """
    writing = folder / _WRITING
    first = dist.get_rank() == 0
    with agree_on(parallel.pipeline.mesh):
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
    save = save_adapter if has_adapters(parallel.module) else save_pretrained
    save(parallel, writing)
    with agree_on(parallel.pipeline.mesh):
        if first:
            for path in [path for pattern in _WEIGHTS for path in folder.glob(pattern)]:
                path.unlink()
            for path in writing.iterdir():
                if path.is_dir():  # of an adapter with a name of its own
                    shutil.rmtree(folder / path.name, ignore_errors=True)
                os.replace(path, folder / path.name)
            writing.rmdir()


def read_weights(parallel: Any, folder: Path) -> None:
    """Load what `write_weights` or `transformers` wrote. A collective. Raises: CheckpointError as `load_pretrained`,
    `missing-file`."""
    if not folder.is_dir():
        what = "there is no folder of this name to load weights from"
        raise CheckpointError(Problem("missing-file", what, str(folder), fix="the path of a checkpoint of this run"))
    if has_adapters(parallel.module):
        read_adapters(parallel.module, folder)
    else:
        load_pretrained(parallel.module, folder)
