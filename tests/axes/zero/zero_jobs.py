"""What each rank does in the tests of ZeRO: memory, mixed precision, messages."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize import build_mesh
from parallelize.axes.zero.shard_data import data_of, shard_data
from parallelize.axes.zero.state_bytes import bytes_per_rank
from parallelize.base.errors import ParallelizeError
from parallelize.training.apply_axes import parallelize_model
from tests.axes.pipeline.pipeline_jobs import build, full_value
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 1e-2},
    "Adadelta": {"lr": 1e-1},
    "Adagrad": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
}


def _bytes(tensors: Any) -> int:
    """Of storages, each counted once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(rank: int, zero: int, axes: dict[str, int], mixed: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(measured, arithmetic) bytes on this rank of parameters, gradients, optimizer state, after two Adam steps."""
    model = build("blocks", torch.float32, 6) if "tp" not in axes else tiny_model("llama", num_hidden_layers=2)
    mesh = build_mesh("cpu", **axes)
    options: dict[str, Any] = {"dtype": torch.bfloat16} if mixed else {}
    parallel = parallelize_model(model, mesh, zero=zero, **options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(2):
        ids, labels = tiny_batch(batch=4, length=5, seed=step)
        optimizer.zero_grad()
        parallel.step(ids, targets=labels)
        optimizer.step()
    params = list(model.parameters())
    data = data_of(model)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    masters = [p for p in stepped if data is not None and data.masters]
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.ndim]
    measured = {
        "parameters": _bytes(params),
        "gradients": _bytes(p.grad for p in params),
        "optimizer": _bytes(masters) + _bytes(state),
    }
    return measured, bytes_per_rank(model, zero, mesh, mixed=mixed)


def mixed_precision(rank: int, zero: int, axes: dict[str, int]) -> tuple[float, float]:
    """(error of gradients against float32, drift of weights after ten tiny steps) under bfloat16 compute."""
    model = tiny_model("llama", num_hidden_layers=2)
    unsharded = copy.deepcopy(model)
    parallel = parallelize_model(model, build_mesh("cpu", **axes), zero=zero, dtype=torch.bfloat16, num_microbatches=2)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=1e-4)
    reference = torch.optim.SGD(unsharded.parameters(), 1e-4)
    expected = dict(unsharded.named_parameters(remove_duplicate=False))
    ids, labels = tiny_batch(batch=4, length=7)
    first = 0.0
    for step in range(10):
        optimizer.zero_grad()
        reference.zero_grad()
        parallel.step(ids, targets=labels)
        loss_of(unsharded(ids).logits, labels).backward()
        grads = {n: full_value(model, n, p.grad).float() for n, p in model.named_parameters()}
        if step == 0:
            first = worst(grads, {n: expected[n].grad for n in grads})[0]
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        for n in grads:  # the same gradients, so that only the storage of weights is compared
            expected[n].grad = grads[n]
        optimizer.step()
        reference.step()
    data = data_of(model)
    assert data is not None
    if zero == 3:
        actual = {n: full_value(model, n, p) for n, p in model.named_parameters()}
        return first, worst(actual, {n: expected[n].detach() for n in actual})[0]
    errors = [0.0]
    for shard in data.shards:
        full = full_value(model, shard.name, shard.stepped)
        errors.append(
            float((full - expected[shard.name].detach()).abs().max() / expected[shard.name].detach().abs().max())
        )
    return first, max(errors)


def nan_gradient(rank: int) -> tuple[str, bool]:
    """A NaN in one rank's gradient: the error on every rank, and whether its gradients are unchanged."""
    model = tiny_model("llama", num_hidden_layers=2)
    parallel = parallelize_model(model, build_mesh("cpu", dp=2, tp=2), zero=2, num_microbatches=2)
    ids, labels = tiny_batch(batch=4, length=5)
    parallel.step(ids, targets=labels)
    if rank == 2:
        model.get_parameter("model.layers.0.mlp.down_proj.weight").grad.to_local()[0, 0] = torch.nan
    before = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    try:
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except ParallelizeError as error:
        unchanged = all(
            torch.equal(p.grad.to_local().nan_to_num(), before[n].nan_to_num()) for n, p in model.named_parameters()
        )
        return str(error), unchanged
    return "nothing", False


def messages(rank: int, zero: int, defer: bool, microbatches: int) -> int:
    """How many reductions over the data axis a step of so many microbatches sends."""
    from unittest import mock

    from parallelize.axes.zero import buckets

    model = build("blocks", torch.float64, 2)
    parallel = parallelize_model(model, build_mesh("cpu", dp=4), zero=zero, defer=defer, num_microbatches=microbatches)
    ids, labels = tiny_batch(batch=8, length=5)
    parallel.step(ids, targets=labels)
    count = 0

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(buckets.dist, "all_reduce", counting(dist.all_reduce)),
        mock.patch.object(buckets, "_reduce_scatter", counting(buckets._reduce_scatter)),
    ):
        parallel.step(ids, targets=labels)
    return count - 2  # the count of tokens and the loss


def skipped_unit(rank: int, skipped: int) -> str:
    """What each rank raises where rank 1 skips a unit in its fourth step."""
    from tests.axes.zero.test_collective_order import WIDTH, skipping

    group = dist.new_group(timeout=timedelta(seconds=3))
    model = shard_data(skipping(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), 3, units=["layers.*"])
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    for _ in range(3):
        model(x, set()).sum().backward()
    try:
        model(x, {skipped} if rank == 1 else set()).sum().backward()
    except ParallelizeError as error:
        return str(error)
    return "nothing"
