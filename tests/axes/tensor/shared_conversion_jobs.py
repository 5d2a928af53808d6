"""What real processes run: one tensor read by several linears, by plan and by dicts, and what is sent for it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import parallelize
from benchmarks.llama import FlatBlock, Llama, plan, stock_styles
from parallelize import build_mesh, full_gradients, parallelize_module, recompute
from tests.support.parity import worst

LAYERS = 2


def planned(form: str, sequence_parallel: bool, flat: bool) -> tuple[nn.Module, nn.Module]:
    """(a parallelized model, the same one unsharded)."""
    torch.manual_seed(0)
    model = Llama(32, LAYERS, heads=4, vocab=24, flat=flat).double()
    reference, mesh = copy.deepcopy(model), build_mesh("cpu", tp=dist.get_world_size())
    if form == "plan":
        parallelize_module(model, mesh, plan(4, flat), sequence_parallel=sequence_parallel)
    else:
        styles = stock if form == "PyTorch's dict" else parallelize
        parallelize_module(model, mesh, stock_styles(sequence_parallel, flat, styles))
    return model, reference


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def error_of(model: nn.Module, reference: nn.Module) -> float:
    return worst(full_gradients(model), {name: p.grad for name, p in reference.named_parameters()})[0]


class _CountCollectives(TorchDispatchMode):
    """Counts what is sent. `CommDebugMode` has hooks on each module, which give each linear an input of its own."""

    KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            self.counts[next((kind for part, kind in self.KINDS.items() if name.startswith(part)), name)] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(rank: int, form: str, sequence_parallel: bool, flat: bool) -> tuple[dict[str, int], float]:
    """(kind -> number of collectives in forward and backward, relative error of the gradients)."""
    model, reference = planned(form, sequence_parallel, flat)
    loss_of(model)  # the first forward compares its inputs over tp
    with _CountCollectives() as mode:
        loss_of(model).backward()
    loss_of(reference).backward()
    return dict(mode.counts), error_of(model, reference)


class _Checkpointed(nn.Module):
    """A layer whose activations PyTorch recomputes."""

    def __init__(self, layer: nn.Module, reentrant: bool):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class _Writes(FlatBlock):
    """Doubles the tensor that q, k and v read, before or after q has read it."""

    before = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        if self.before:
            h.mul_(2)
        q = self.wq(h)
        if not self.before:
            h.mul_(2)
        k, v = self.wk(h), self.wv(h)
        batch, length, _ = q.shape
        q, k, v = (w.view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def ways_of_calling(rank: int, form: str, sequence_parallel: bool, way: str) -> float:
    """The relative error of the gradients, or of the loss where nothing is differentiated."""
    model, reference = planned(form, sequence_parallel, flat=True)
    if way.startswith("written"):
        for layer in (*model.layers, *reference.layers):
            layer.__class__, layer.before = _Writes, way == "written before"
    if way == "written in between":  # a backward would refuse it
        with torch.no_grad():
            expected = loss_of(reference)
            return float((loss_of(model) - expected).abs() / expected)
    if way == "no_grad first":
        with torch.no_grad():
            loss_of(model)
    if way == "recompute":
        recompute(model, "full", units=["layers.*"])
    if "checkpoint" in way:
        layers = list(model.layers)
        del model.layers
        model.layers = [_Checkpointed(layer, way.startswith("reentrant")) for layer in layers]
        loss_of(model).backward()
        model.layers = nn.ModuleList(layers)
    else:
        loss_of(model).backward()
    loss_of(reference).backward()
    unused = [name for name, p in reference.named_parameters() if p.grad is None]
    for name in unused:  # by the layers that write
        reference.get_parameter(name).grad = torch.zeros_like(reference.get_parameter(name))
        model.get_parameter(name).grad = torch.zeros_like(model.get_parameter(name))
    return error_of(model, reference)


class _ReadsInside(nn.Module):
    """Computes with its input, and gives it to a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x))), _mean_square(x)


class _Reads(nn.Module):
    """Computes with the output of its norm, and gives it to a block that does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(8), _ReadsInside()

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        out, inside = self.block(h)
        return out, inside, _mean_square(h)


def _mean_square(x: Any) -> Any:
    mean = x.square().mean()
    return mean.full_tensor() if isinstance(mean, DTensor) else mean


def a_read_dtensor(rank: int) -> dict[str, float]:
    """Gradients where the stock forward itself computes with the DTensors that styles returned."""
    torch.manual_seed(0)
    model = _Reads().double()
    reference = copy.deepcopy(model)
    styles = {
        "norm": parallelize.SequenceParallel(),
        "block": parallelize.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "block.a": parallelize.ColwiseParallel(),
        "block.b": parallelize.RowwiseParallel(),
    }
    parallelize_module(model, build_mesh("cpu", tp=dist.get_world_size()), styles)
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    size = 8 // dist.get_world_size()
    outputs, expected = model(x[:, rank * size : (rank + 1) * size]), reference(x)
    for out, inside, outside in (outputs, expected):
        (out.square().sum() + 2 * inside + 3 * outside).backward()
    errors = [float((actual - value).detach().abs().max()) for actual, value in zip(outputs, expected, strict=True)]
    local = slice(rank * size, (rank + 1) * size)
    h, reference_h = model.norm(x[:, local]), reference.norm(x)
    (of_h,) = torch.autograd.grad(model.block(h)[0].square().sum(), h)
    (expected_of_h,) = torch.autograd.grad(reference.block(reference_h)[0].square().sum(), reference_h)
    with torch.inference_mode():
        inferred = model(x[:, local])[0]
    return {
        "outputs": max(errors),
        "gradients": error_of(model, reference),
        "gradient of a DTensor": float((of_h.full_tensor() - expected_of_h).abs().max()),
        "inference mode": float((inferred - expected[0]).detach().abs().max()),
    }
