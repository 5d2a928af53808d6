"""Loops of other libraries, and a watch: they change what a process has once, so that their ranks are processes."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from parallelize import watch
from parallelize.training.trainers.trainer import ParallelTrainer
from tests.matrix.axes import Axis
from tests.matrix.feature import feature
from tests.matrix.kinds import ROWS
from tests.matrix.sides import LEARNING_RATE, Side
from tests.training.trainers.trainer_jobs import arguments, history, launched

_OF_FLOAT32 = 1e-6  # the Trainer sums its losses in float32, and so is the norm by which it clips


def _is_small(axis: Axis) -> bool:
    return axis.world_size <= 4


def _samples(side: Side, batches: int = 2) -> list[dict[str, torch.Tensor]]:
    """Every row of the first batches, with labels."""
    return [
        {"input_ids": ids, "labels": labels}
        for number in range(batches)
        for ids, labels in zip(side.kind.batch(number)[0]["input_ids"], side.kind.labels(number), strict=True)
    ]


def _run_trainer(side: Side, **settings: Any) -> None:
    """A stock Trainer over two batches: what it logs and evaluates, and the weights in the end."""
    from transformers import PrinterCallback, Trainer

    class OnMesh(ParallelTrainer, Trainer):
        pass

    side.place()
    with launched(1 if side.alone else None):
        settings = {"max_steps": 2, "optim": "sgd", "learning_rate": LEARNING_RATE, "max_grad_norm": 0.5, **settings}
        args = arguments(side.folder, **settings)
        data = {"train_dataset": _samples(side), "eval_dataset": _samples(side, 1)}
        if side.alone:
            trainer: Any = Trainer(side.model, args, **data)
        else:
            trainer = OnMesh(side.parallel, args, global_batch_size=ROWS, **data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        for name in ("loss", "grad_norm"):
            for value in history(trainer, name):
                side.record(name, value)
        side.record("evaluated", trainer.evaluate()["eval_loss"])


def trainers(**facts: Any) -> Any:
    """A row of a decoder, where accelerate is installed."""
    here = {"processes": True, "needs": {"causal", "stock"}, "bound": _OF_FLOAT32, "on": _is_small}
    return feature(**{**here, **facts}) if find_spec("accelerate") else lambda run: run


@trainers()
def trainer(side: Side) -> None:
    _run_trainer(side)


@trainers()
def trainer_that_accumulates(side: Side) -> None:
    _run_trainer(side, gradient_accumulation_steps=2, per_device_train_batch_size=ROWS // 2)


@feature(processes=True, names=("watch", "Watch"), on=_is_small)
def watched(side: Side) -> None:
    """Steps, an update and an evaluation under a watch that finds nothing."""
    side.place()
    opened = nullcontext() if side.alone else watch(side.mesh, timeout_s=60, folder=f"{side.folder}/watch")
    with opened:
        side.train()
        side.update()
        side.evaluate(2)
