"""Functions that each rank runs in the tests of pipelines and of meshes with all axes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import build_mesh, full_parameter
from parallelize.axes.pipeline.cut import cut_pipeline
from parallelize.axes.pipeline.engine import Pipeline
from parallelize.axes.pipeline.ties import tie_parameters
from parallelize.plan.schema import Cuts
from parallelize.state.records import record_of
from parallelize.training.apply_axes import parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import TOLERANCE, loss_of, worst


class Blocks(nn.Module):
    """A plain model: embedding, blocks, head; a skip from the first block to the last."""

    def __init__(self, layers: int = 8, width: int = 10, vocab: int = 67):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids) * self.scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def build(family: str, dtype: torch.dtype, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if family == "blocks":
        return Blocks(layers).to(dtype)
    if family == "qwen3-sliding":  # the first layer attends to all tokens, the others to four
        return tiny_model("qwen3", dtype, num_hidden_layers=layers, **SLIDING)
    if family == "gemma3-long":  # more layers than its pattern of two sliding ones and a full one
        kinds = ["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(max(layers, 4))]
        return tiny_model("gemma3", dtype, num_hidden_layers=len(kinds), layer_types=kinds)
    return tiny_model(family, dtype, num_hidden_layers=layers)


def logits_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def reference(
    model: nn.Module, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    loss = loss_of(logits_of(model(ids)), labels)
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def schedules(
    rank: int, family: str, name: str, stages_per_rank: int, dtype: torch.dtype, microbatches: int = 4
) -> float:
    """The largest relative error of loss and gradients of a pipeline alone."""
    world = torch.distributed.get_world_size()
    model = build(family, dtype, world * stages_per_rank + 1)
    ids, labels = tiny_batch(batch=8, length=7)
    expected_loss, expected = reference(model, ids, labels)
    mesh = build_mesh("cpu", pp=world)
    cuts = Cuts("blocks", first=("embed", "scale"), last=("head",)) if family == "blocks" else None
    cut_pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, cuts=cuts)
    tie_parameters(model)
    pipeline = Pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, num_microbatches=microbatches)
    loss = pipeline.step(ids, targets=labels)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    owned = set(gradients)
    assert owned
    error, parameter = worst(gradients, {n: expected[n] for n in owned})
    assert error <= TOLERANCE[dtype], (parameter, error)
    return max(error, abs(float(loss - expected_loss)) / abs(float(expected_loss)))


def full_value(module: nn.Module, name: str, value: Any) -> torch.Tensor:
    """A full parameter or gradient."""
    if not isinstance(value, DTensor):
        return value.detach()
    if record_of(module) is not None:
        return full_parameter(module, name, value).detach()
    return value.full_tensor().detach()


def mesh_parity(rank: int, family: str, axes: dict[str, int], dtype: torch.dtype, options: dict[str, Any]) -> float:
    """Loss, gradients, norm and weights after three SGD steps of a model on a mesh; the largest relative error."""
    model = build(family, dtype, axes.get("pp", 1) * (2 if "schedule" in options else 1) + 1)
    unsharded = copy.deepcopy(model).double()  # exact for float32 too, whose tolerance is for the mesh's rounding alone
    mesh = build_mesh("cpu", **axes)
    if family == "blocks":
        options["cuts"] = Cuts("blocks", first=("embed", "scale"), last=("head",))
    parallel = parallelize_model(model, mesh, **options)
    data = [axis for axis in ("dp_replicate", "dp") if axis in axes]
    data_ranks = 1
    data_rank = 0
    for axis in data:
        data_rank = data_rank * axes[axis] + mesh.get_local_rank(axis)
        data_ranks *= axes[axis]
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    reference_optimizer = torch.optim.SGD(unsharded.parameters(), 0.05)
    batch = 2 * parallel.pipeline.schedule.num_microbatches
    errors = {}
    for step in range(3):
        ids, labels = tiny_batch(batch=batch * data_ranks, length=7, seed=step)
        local = slice(batch * data_rank, batch * (data_rank + 1))
        loss = parallel.step(ids[local], targets=labels[local])
        expected_loss = loss_of(logits_of(unsharded(ids)), labels)
        expected_loss.backward()
        errors[f"loss {step}"] = float((loss - expected_loss).abs() / expected_loss.abs())
        expected = dict(unsharded.named_parameters(remove_duplicate=False))
        if step == 0:
            actual = {n: full_value(model, n, p.grad) for n, p in model.named_parameters() if p.grad is not None}
            assert actual.keys() == {n for n, _ in model.named_parameters() if expected[n].grad is not None}
            error, name = worst(actual, {n: expected[n].grad for n in actual})
            errors[f"gradient of {name}"] = error
            # a second time, added to gradients that are reduced already
            parallel.step(ids[local], targets=labels[local])
            twice = {n: full_value(model, n, p.grad) / 2 for n, p in model.named_parameters() if p.grad is not None}
            error, name = worst(twice, {n: expected[n].grad for n in twice})
            errors[f"gradient after two steps of {name}"] = error
            for parameter in model.parameters():
                if parameter.grad is not None:
                    (parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad).div_(2)
        largest = parallel.clip_grad_norm_(1e9, float("inf"))
        norm = parallel.clip_grad_norm_(0.5)
        expected_largest = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1e9, float("inf"))
        expected_norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)
        errors[f"norm {step}"] = float((norm - expected_norm).abs() / expected_norm)
        errors[f"largest {step}"] = float((largest - expected_largest).abs() / expected_largest)
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    parallel.check_ties()
    actual = {n: full_value(model, n, p) for n, p in model.named_parameters()}
    errors["weights"] = worst(actual, {n: expected[n].detach() for n in actual})[0]
    assert max(errors.values()) <= TOLERANCE[dtype], errors
    return max(errors.values())
