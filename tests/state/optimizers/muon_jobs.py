"""Training by Muon on a mesh and by `torch.optim.Muon` on the unsharded model, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import Muon, build_mesh, export_weights, parallelize_model
from parallelize.axes.zero.buckets import as_gradient
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.plan.model_facts import named_once
from parallelize.state.optimizers.matrices import matrix_names
from parallelize.state.stored_slices import StoredSlices
from tests.support.models import tiny_batch

STEPS = 3
SETTINGS = {"lr": 0.05, "weight_decay": 0.1}
ADAM = {"adamw_lr": 3e-3, "adamw_weight_decay": 0.01}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tiny_batch(batch=4, length=8, seed=step) for step in range(STEPS)]


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())


class Reference:
    """The unsharded model with stock optimizers. Matrices of stacked experts are stepped one by one."""

    def __init__(self, base: nn.Module, max_norm: float | None = None):
        self.model, self.max_norm = deepcopy(base), max_norm
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        names = matrix_names(self.model, shapes)
        self.whole = {n: p for n, p in self.model.named_parameters() if n in names}
        self.parts = {
            name: [nn.Parameter(part.detach()) for part in (p if p.ndim == 3 else [p])]
            for name, p in self.whole.items()
        }
        self.muon = torch.optim.Muon([part for parts in self.parts.values() for part in parts], **SETTINGS)
        others = [p for n, p in self.model.named_parameters() if n not in names]
        self.adam = torch.optim.AdamW(others, lr=ADAM["adamw_lr"], weight_decay=ADAM["adamw_weight_decay"])

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.zero_grad()
        loss = loss_of(self.model, ids, labels)
        loss.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.update()
        return float(loss.detach())

    def update(self) -> None:
        for name, parts in self.parts.items():
            grad = self.whole[name].grad
            for number, part in enumerate(parts):
                part.grad = None if grad is None else (grad[number] if grad.ndim == 3 else grad)
        self.muon.step()
        self.adam.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def trained(
    rank: int,
    base: nn.Module,
    axes: dict[str, int],
    options: dict[str, Any],
    max_norm: float | None = None,
    optimizer: Callable[[Any], Any] | None = None,
) -> tuple[dict[str, torch.Tensor], Any]:
    """(full weights, the optimizer) after the steps."""
    parallel = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), **options)
    built = parallel.optimizer(Muon, **SETTINGS, **ADAM) if optimizer is None else optimizer(parallel)
    train(parallel, built, max_norm)
    return full_weights(parallel), built


def train(parallel: Any, built: Any, max_norm: float | None = None) -> None:
    """The steps, on this data rank's part of each batch."""
    names = parallel.mesh.mesh_dim_names
    size = parallel.mesh.size(names.index("dp")) if "dp" in names else 1
    index = parallel.mesh.get_local_rank("dp") if "dp" in names else 0
    for ids, labels in batches():
        rows = slice(index * len(ids) // size, (index + 1) * len(ids) // size)
        built.zero_grad()
        parallel.step(ids[rows], targets=labels[rows])
        if max_norm is not None:
            parallel.clip_grad_norm_(max_norm)
        built.step()


def full_weights(parallel: Any) -> dict[str, torch.Tensor]:
    """Every weight of the model, on every rank."""
    buckets = export_weights(parallel, names="model")
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}


def set_gradients(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Set the gradients of a model on a mesh to the local parts of these full ones."""
    where = StoredSlices(model)
    for names, parameter in named_once(model):
        stored = where.of(names, parameter)
        local = torch.zeros_like(plain_local(parameter))
        for pair in stored.slices:
            local[pair.local] = gradients[names[0]][pair.full]
        parameter.grad = as_gradient(parameter, local)
