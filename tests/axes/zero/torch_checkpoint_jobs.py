"""What each rank does in the tests of PyTorch's distributed checkpoint: a run is saved on one mesh and continued on
another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from parallelize import build_mesh, full_state_dict, parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst

STEPS = 2
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


class Run:
    """A model on a mesh with an optimizer, some of whose parameters have a learning rate of their own."""

    def __init__(self, rank: int, axes: dict[str, int], options: dict[str, Any], cls: str, family: str, seed: int):
        torch.manual_seed(seed)
        self.model = tiny_model(family, options.get("dtype", torch.float64))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * seed)
        self.mesh = build_mesh("cpu", **axes)
        self.parallel = parallelize_model(self.model, self.mesh, **options)
        self.optimizer = self.parallel.optimizer(
            getattr(torch.optim, cls), groups_of(self.parallel.module), **CLASSES[cls]
        )
        self.ranks, self.data_rank = 1, 0
        for axis in ("dp_replicate", "dp"):
            if axis in axes:
                self.ranks *= axes[axis]
                self.data_rank = self.data_rank * axes[axis] + self.mesh.get_local_rank(axis)

    def train(self, first: int) -> None:
        for step in range(first, first + STEPS):
            ids, labels = (tensor.chunk(self.ranks)[self.data_rank] for tensor in batch(step))
            self.parallel.step(ids, targets=labels)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in full_state_dict(self.parallel.module, every_rank=True).items()}

    def state(self, options: StateDictOptions) -> tuple[dict[str, Any], Any]:
        return get_state_dict(self.parallel.module, self.optimizer, options=options)

    def take(self, model: dict[str, Any], optimizer: Any, options: StateDictOptions) -> None:
        set_state_dict(
            self.parallel.module,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=options,
        )

    def save(self, folder: Path, options: StateDictOptions) -> None:
        model, optimizer = self.state(options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path, options: StateDictOptions) -> None:
        model, optimizer = self.state(options)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        self.take(state["model"], state["optimizer"], options)


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Two parameter groups: vectors have half of the learning rate."""
    parameters = list(model.parameters())
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    return [{"params": [p for p in parameters if p.ndim > 1]}, {"params": vectors, "lr": 5e-3}]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tiny_batch(batch=8, length=8, seed=step)


def unsharded(cls: str, family: str) -> dict[str, torch.Tensor]:
    """The weights of the unsharded model after all steps."""
    torch.manual_seed(0)
    model = tiny_model(family, torch.float64)
    optimizer = getattr(torch.optim, cls)(groups_of(model), **CLASSES[cls])
    train_unsharded(model, optimizer, 0)
    train_unsharded(model, optimizer, STEPS)
    return model.state_dict()


def train_unsharded(model: Any, optimizer: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        ids, labels = batch(step)
        F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


Where = tuple[dict[str, int], dict[str, Any]]


def continued(
    rank: int, saved: Where, loaded: Where, cls: str, folder: str, family: str = "llama", flat: bool = False
) -> dict[str, float]:
    """Relative errors of a run that goes on elsewhere: of its weights, against the unsharded model's and the other
    run's."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first = Run(rank, *saved, cls, family, seed=0)
    first.train(0)
    first.save(Path(folder), options)
    at_save = first.weights()
    first.train(STEPS)
    second = Run(rank, *loaded, cls, family, seed=1)
    second.train(0)
    second.optimizer.param_groups[0]["lr"] = 1.0
    second.load(Path(folder), options)
    at_load = second.weights()
    second.train(STEPS)
    want = first.weights() if "dtype" in saved[1] else unsharded(cls, family)
    return {
        "loaded": worst(at_load, at_save)[0],
        "uninterrupted": worst(first.weights(), want)[0],
        "continued": worst(second.weights(), want)[0],
    }


def continued_from_full(rank: int, where: Where, cls: str, family: str = "llama") -> float:
    """Relative error of the weights of a run that goes on from full state dicts of rank 0, without files."""
    first = Run(rank, *where, cls, family, seed=0)
    first.train(0)
    full = first.state(StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert not any(rank and bool(part) for part in full)
    second = Run(rank, *where, cls, family, seed=1)
    # in two calls: `set_state_dict` leaves out the model on ranks that give none of it
    options, (model, optimizer) = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), full
    set_model_state_dict(second.parallel.module, model, options=options)
    set_optimizer_state_dict(second.parallel.module, second.optimizer, optimizer, options=options)
    second.train(STEPS)
    return worst(second.weights(), unsharded(cls, family))[0]


def in_one_process(rank: int, where: Where, cls: str, folder: str, family: str = "llama") -> float | None:
    """Relative error of the weights of an unsharded run that goes on with the files of a mesh, in the process of rank
    0."""
    first = Run(rank, *where, cls, family, seed=0)
    first.train(0)
    first.save(Path(folder), StateDictOptions())
    if rank:
        return None
    model = tiny_model(family, torch.float64, seed=1)
    optimizer = getattr(torch.optim, cls)(groups_of(model), **CLASSES[cls])
    states = get_state_dict(model, optimizer)
    loaded = dict(zip(("model", "optimizer"), states, strict=True))
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train_unsharded(model, optimizer, STEPS)
    return worst(model.state_dict(), unsharded(cls, family))[0]


class Scaled(nn.Module):
    """Matrices that do not divide by the ranks, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.last(self.first(x).tanh())


def scalars_and_uneven_rows(rank: int, zero: int, cls: str, folder: str) -> bool:
    """Whether a run of `Scaled` that goes on from its files has the weights of the run that saved them."""

    def built(seed: int) -> Run:
        torch.manual_seed(seed)
        run = Run.__new__(Run)
        run.parallel = parallelize_model(Scaled().double(), build_mesh("cpu", dp=4), zero=zero)
        run.optimizer = run.parallel.optimizer(getattr(torch.optim, cls), **CLASSES[cls])
        return run

    def train(run: Run) -> None:
        for seed in range(STEPS):
            torch.manual_seed(10 * rank + seed)
            run.parallel.module(torch.randn(3, 6, dtype=torch.float64)).pow(2).mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    first, second = built(0), built(1)
    train(first)
    first.save(Path(folder), StateDictOptions())
    train(first)
    second.load(Path(folder), StateDictOptions())
    train(second)
    want = first.weights()
    return all(torch.equal(value, want[name]) for name, value in second.weights().items())
