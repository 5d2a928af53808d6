"""What each rank does in the tests of pipelines and of whole meshes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_module
from parallelize.pipeline.cut import cut_pipeline
from parallelize.pipeline.engine import Pipeline
from parallelize.plan.schema import Cuts
from parallelize.ties import tie_parameters
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import TOLERANCE, loss_of, worst

LAYERS = {1: 4, 2: 8}


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


def build(family: str, dtype: torch.dtype, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if family == "blocks":
        return Blocks(layers).to(dtype)
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
    want_loss, want = reference(model, ids, labels)
    mesh = build_mesh("cpu", pp=world)
    cuts = Cuts("blocks", first=("embed", "scale"), last=("head",)) if family == "blocks" else None
    cut_pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, cuts=cuts)
    tie_parameters(model)
    pipeline = Pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, num_microbatches=microbatches)
    loss = pipeline.step(ids, targets=labels)
    got = {n: p.grad for n, p in model.named_parameters()}
    owned = {n for n, p in model.named_parameters()}
    assert owned
    error, name_ = worst(got, {n: want[n] for n in owned})
    assert error <= TOLERANCE[dtype], (name_, error)
    return max(error, abs(float(loss - want_loss)) / abs(float(want_loss)))
