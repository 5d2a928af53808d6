"""What each rank does in the tests of `ParallelTrainer`: a stock Trainer around a tiny model, on a mesh or on one
process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback

from parallelize import build_mesh
from parallelize.training.apply_axes import parallelize_model
from parallelize.training.data.packing import FittedRows
from tests.axes.tensor.install.adapted_models import adapted_model
from tests.support.models import tiny_model

SAMPLES, LENGTH, BATCH = 40, 11, 8


def rows(count: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    """Samples whose numbers of labels differ, so that a mean of means is another loss."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for index in range(count):
        ids = torch.randint(3, 67, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: index % 7] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


def arguments(folder: str, **settings: Any) -> Any:
    from transformers import TrainingArguments

    quiet = dict(logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", log_level="error")
    training = dict(
        max_steps=4,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        weight_decay=0.1,
        seed=3,
        per_device_train_batch_size=BATCH,
    )
    return TrainingArguments(folder, **{**quiet, **training, **settings})


@contextmanager
def launched(world_size: int | None = None) -> Iterator[None]:
    """What torchrun tells a process, and accelerate as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    size = dist.get_world_size() if world_size is None else world_size
    rank = dist.get_rank() if dist.is_initialized() else 0
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size} if size > 1 else {}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.update({name: str(place) for name, place in places.items()})
    try:
        yield
    finally:
        for name in places:
            del os.environ[name]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def history(trainer: Any, name: str) -> list[float]:
    return [float(log[name]) for log in trainer.state.log_history if name in log]


def outcome(trainer: Any) -> dict[str, Any]:
    """What a run has logged, and what it evaluates in the end."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logged = {name: history(trainer, name) for name in names}
    metrics = trainer.evaluate()
    measured = {name: value for name, value in metrics.items() if name.startswith("eval_") and "_per_" not in name}
    del measured["eval_runtime"]
    return logged | {f"last {name}": value for name, value in measured.items()} | {"flos": trainer.state.total_flos}


def run_trainer(
    rank: int,
    folder: str,
    axes: dict[str, int] | None,
    options: dict[str, Any] | None = None,
    *,
    family: str = "llama",
    adapter: str = "",
    config: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    resume: bool = False,
    stop_after: int = 0,
    extras: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A run on a mesh, or, without axes, of the stock Trainer on one process: the reference. Returns what it has
    logged."""
    from transformers import Trainer

    from parallelize.training.trainers.trainer import ParallelTrainer

    class OnMesh(ParallelTrainer, Trainer):
        pass

    multiprocessing.current_process()._config["daemon"] = False  # a rank may start workers
    with launched(None if axes else 1):
        model = adapted_model(family, adapter, dtype) if adapter else tiny_model(family, dtype, **(config or {}))
        data = dict(train_dataset=rows(), eval_dataset=rows(13)) | (extras or {})
        data["callbacks"] = [Stops(stop_after), *data.get("callbacks", [])]
        if axes:
            parallel = parallelize_model(model, build_mesh("cpu", **axes), **(options or {}))
            trainer = OnMesh(parallel, arguments(folder, **settings), global_batch_size=BATCH, **data)
        else:
            trainer = Trainer(model, arguments(folder, **settings), **data)
        trainer.train(resume_from_checkpoint=resume or None)
        return outcome(trainer)


def translated(rank: int, folder: str, axes: dict[str, int] | None) -> dict[str, Any]:
    """A run of T5 by the `Seq2SeqTrainer`, whose evaluation weighs a last batch of fewer samples like the others."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from parallelize.training.trainers.trainer import ParallelTrainer

    class OnMesh(ParallelTrainer, Seq2SeqTrainer):
        pass

    with launched(None if axes else 1):
        torch.manual_seed(0)
        sizes = dict(vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
        model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0)).double()
        args = Seq2SeqTrainingArguments(**arguments(folder, max_steps=2).to_dict())
        data = dict(train_dataset=rows(), eval_dataset=rows(13))
        if axes:
            parallel = parallelize_model(model, build_mesh("cpu", **axes))
            trainer: Any = OnMesh(parallel, args, global_batch_size=BATCH, **data)
        else:
            trainer = Seq2SeqTrainer(model, args, **data)
        trainer.train()
        return outcome(trainer)


def generation(rank: int, folder: str, axes: dict[str, int] | None, options: dict[str, Any] | None = None) -> Any:
    """What the model writes after each evaluation, by its own `generate`."""
    writes = Writes()
    run_trainer(rank, folder, axes, options, extras={"callbacks": [writes]}, eval_strategy="steps", eval_steps=2)
    return writes.tokens


class Writes(TrainerCallback):
    def __init__(self):
        self.tokens: list[Any] = []

    def on_evaluate(self, args, state, control, model=None, **_):
        prompts = torch.stack([row["input_ids"] for row in rows(3)])
        self.tokens.append(model.generate(prompts, max_new_tokens=4, do_sample=False).tolist())


def moving_average(rank: int, folder: str, axes: dict[str, int] | None, options: dict[str, Any] | None = None) -> float:
    """The sum of squares of all parameters of an exponential moving average of the model."""
    averages = Averages()
    run_trainer(rank, folder, axes, options, extras={"callbacks": [averages]})
    parameters = averages.copy.module.parameters()
    squares = [parameter.detach().square().sum() for parameter in parameters]
    return sum(float(square.full_tensor() if hasattr(square, "full_tensor") else square) for square in squares)


class Averages(TrainerCallback):
    copy: Any = None

    def on_train_begin(self, args, state, control, model=None, **_):
        self.copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_step_end(self, args, state, control, model=None, **_):
        self.copy.update_parameters(model)


def scaled(rank: int, folder: str, axes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """With a GradScaler, as accelerate makes one for fp16 on an accelerator; here its forward stays in full
    precision."""
    from transformers import Trainer

    from parallelize.training.trainers.trainer import ParallelTrainer

    class Scaled(ParallelTrainer, Trainer):
        def _prepare_for_training(self, *args: Any) -> Any:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"
            return super()._prepare_for_training(*args)

    with launched():
        parallel = parallelize_model(tiny_model("llama", torch.float64), build_mesh("cpu", **axes), **options)
        trainer = Scaled(parallel, arguments(folder), train_dataset=rows(), global_batch_size=BATCH)
        trainer.train()
        return {name: history(trainer, name) for name in ("loss", "grad_norm")}


def counted_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's: this rank's part of the mean."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def predicted(evaluated: Any) -> dict[str, float]:
    """Metrics that show which predictions were gathered, and in which order."""
    logits = evaluated.predictions
    order = (logits.sum((1, 2)) * np.arange(len(logits))).sum()
    right = (logits.argmax(-1) == evaluated.label_ids).sum()
    return {"count": float(len(logits)), "order": float(order), "right": float(right)}


def packed(
    rank: int, folder: str, axes: dict[str, int] | None, options: dict[str, Any] | None = None, **settings: Any
) -> Any:
    documents = [row["input_ids"][: 3 + index % 8].tolist() for index, row in enumerate(rows(100))]
    data = FittedRows(documents, 16, unshifted=True)
    extras = {"train_dataset": [data[index] for index in range(SAMPLES)]}
    return run_trainer(rank, folder, axes, options, extras=extras, **settings)


class Stops(TrainerCallback):
    """Ends a run early, as a crash would, after a number of steps; 0: never."""

    def __init__(self, last: int):
        self.last = last

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == self.last


def stops_early(
    rank: int, folder: str, axes: dict[str, int] | None, options: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    from transformers import EarlyStoppingCallback

    stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.05)
    return run_trainer(rank, folder, axes, options, extras={"callbacks": [stopping]}, **settings)
