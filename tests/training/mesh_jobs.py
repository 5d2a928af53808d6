"""What each rank does in the tests of failed steps and of gradients of uneven inputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh
from parallelize.axes.zero.optimizer import build_optimizer
from parallelize.axes.zero.shard_data import shard_data
from parallelize.base.errors import ParallelizeError
from parallelize.plan.schema import Cuts
from parallelize.training.apply_axes import parallelize_model
from tests.axes.pipeline.behavior_jobs import BLOCKS, FailingBlock
from tests.axes.pipeline.pipeline_jobs import build, full_value, reference
from tests.support.models import tiny_batch
from tests.support.parity import loss_of, worst


def fails_then_works(
    rank: int, axes: dict[str, int], options: dict[str, Any], backward: bool, everywhere: bool
) -> float:
    """A microbatch fails on every rank of a stage, or on one: every rank gets the error, and the next step is right."""
    model = build("blocks", torch.float64, 4)
    ids, labels = tiny_batch(batch=8, length=5)
    _, expected = reference(model, ids, labels)
    expected = {n.replace("blocks.2.", "blocks.2.inner."): g for n, g in expected.items()}
    armed = everywhere or rank == dist.get_world_size() - 1
    model.blocks[2] = FailingBlock(model.blocks[2], 1 if armed else 10**9, backward)
    mesh = build_mesh("cpu", **axes)
    parallel = parallelize_model(model, mesh, num_microbatches=2, cuts=BLOCKS, **options)
    half = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    try:
        parallel.step(ids[half], targets=labels[half])
        return 9.0
    except ParallelizeError as error:
        assert error.slugs == ("stage-failed",), error
    errors = []
    for _ in range(2):
        model.zero_grad()
        parallel.step(ids[half], targets=labels[half])
        actual = {n: full_value(model, n, p.grad) for n, p in model.named_parameters()}
        errors.append(worst(actual, {n: expected[n] for n in actual})[0])
    return max(errors)


def an_id_beyond_the_vocabulary(rank: int, axes: dict[str, int], options: dict[str, Any]) -> str:
    """The error of a step whose last row has an id that no table has, on every rank."""
    model = build("llama", torch.float64, 2)
    ids, labels = tiny_batch(batch=4, length=5)
    ids[-1, -1] = 10_000
    parallel = parallelize_model(model, build_mesh("cpu", **axes), **options)
    try:
        parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        return str(error)
    return ""


def _data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def _backward(model: nn.Module, unsharded: nn.Module, step: int) -> None:
    model(_data(step, dist.get_rank())).pow(2).sum().backward()
    for other in range(dist.get_world_size()):
        unsharded(_data(step, other)).pow(2).sum().backward()


class OddShapes(nn.Module):
    """A scalar, a transposed weight, fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64).t())
        self.bias = nn.Parameter(torch.randn(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * (x @ self.weight) + self.bias


def odd_shapes(rank: int, zero: int, fused: bool) -> float:
    torch.manual_seed(0)
    model = OddShapes()
    unsharded = copy.deepcopy(model)
    with torch.no_grad():
        unsharded.weight = nn.Parameter(unsharded.weight.contiguous())
    shard_data(model, build_mesh("cpu", dp=dist.get_world_size()), zero)
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=0.1, fused=fused)
    reference = torch.optim.AdamW(unsharded.parameters(), lr=0.1)
    from parallelize import clip_grad_norm_

    errors = []
    for step in range(3):
        _backward(model, unsharded, step)
        norm = clip_grad_norm_(model, 1.0)
        errors.append(float((norm - nn.utils.clip_grad_norm_(unsharded.parameters(), 1.0)).abs()))
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    actual = {n: full_value(model, n, p) for n, p in model.named_parameters()}
    return max(*errors, worst(actual, {n: p.detach() for n, p in unsharded.named_parameters()})[0])


def many_narrow_microbatches(rank: int, zero: int) -> float:
    """512 gradients of one, summed: bfloat16 would stop at 256."""
    model = nn.Linear(4, 4, bias=False)
    options = {
        "loss": lambda out, y: out.float().sum() / 4,
        "count": lambda y: 1,
        "num_microbatches": 512,
        "defer": True,
    }
    parallel = parallelize_model(model, build_mesh("cpu", dp=2), zero=zero, dtype=torch.bfloat16, **options)
    parallel.step(torch.ones(512, 4, dtype=torch.bfloat16), targets=torch.ones(512))
    return float((full_value(model, "weight", model.weight.grad) * 4 - 512).abs().max())


def lengths_of_their_own(rank: int) -> float:
    """Data ranks may have sequences of other lengths, and change them at other times."""
    model = build("blocks", torch.float64, 2)
    unsharded = copy.deepcopy(model)
    mesh = build_mesh("cpu", pp=2, dp=2)
    parallel = parallelize_model(model, mesh, num_microbatches=2, cuts=Cuts("blocks", ("embed", "scale"), ("head",)))
    errors = []
    for lengths in ((5, 7), (5, 6), (7, 5)):
        batches = [tiny_batch(batch=4, length=length, seed=length) for length in lengths]
        ids, labels = batches[mesh.get_local_rank("dp")]
        model.zero_grad()
        unsharded.zero_grad()
        parallel.step(ids, targets=labels)
        total = sum(int((labels != -100).sum()) for _, labels in batches)
        for ids, labels in batches:
            (loss_of(unsharded(ids), labels) * (labels != -100).sum() / total).backward()
        actual = {n: p.grad for n, p in model.named_parameters()}
        expected = dict(unsharded.named_parameters())
        errors.append(worst(actual, {n: expected[n].grad for n in actual})[0])
    return max(errors)


def large_parameters(rank: int, zero: int) -> float:
    """Parameters that are gathered in place, next to small ones in a common buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1024), nn.Tanh(), nn.Linear(1024, 256)).double()
    unsharded = copy.deepcopy(model)
    shard_data(model, build_mesh("cpu", dp=dist.get_world_size()), zero)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(unsharded.parameters(), 0.1)
    for step in range(2):
        _backward(model, unsharded, step)
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    actual = {n: full_value(model, n, p) for n, p in model.named_parameters()}
    return worst(actual, {n: p.detach() for n, p in unsharded.named_parameters()})[0]
