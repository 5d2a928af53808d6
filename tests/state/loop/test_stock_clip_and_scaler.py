"""PyTorch's own `clip_grad_norm_` and `GradScaler` on a mesh: the norm of the unsharded model, one decision on all
ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelize import GradientError, build_mesh, build_optimizer, parallelize_model, shard_data
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.refused import WIDTH, Block
from tests.support.threads import run_ranks

SETTINGS = [
    ({"pp": 2}, 0),
    ({"pp": 2, "tp": 2}, 0),
    ({"pp": 2, "dp": 2}, 1),
    ({"pp": 2, "dp": 2}, 2),
    ({"pp": 2, "dp": 2}, 3),
]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.variants(every=9)
@pytest.mark.parametrize("source", ["model", "optimizer"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(("axes", "zero"), SETTINGS, ids=str)
def test_stock_clipping_over_stages(axes, zero, norm_type, source):
    unsharded = tiny_model("qwen2", torch.float64, num_hidden_layers=2, tie_word_embeddings=True)
    models = [copy.deepcopy(unsharded) for _ in range(math.prod(axes.values()))]
    ids, labels = tiny_batch(batch=4, length=5)
    loss_of(unsharded(ids).logits, labels).backward()
    expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.1, norm_type)

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), zero=zero, num_microbatches=2)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        data_rank, data_ranks = 0, axes.get("dp", 1)
        if data_ranks > 1:
            data_rank = parallel.mesh.get_local_rank("dp")
        part = slice(4 // data_ranks * data_rank, 4 // data_ranks * (data_rank + 1))
        parallel.step(ids[part], targets=labels[part])
        parameters = list(parallel.module.parameters()) if source == "model" else stepped_by(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        clipped = torch.nn.utils.clip_grad_norm_(parameters, 1e9, norm_type)
        torch.testing.assert_close(clipped, torch.tensor(0.1, dtype=torch.float64), rtol=1e-5, atol=0)

    run_ranks(len(models), body)


def test_stock_clipping_of_what_is_not_finite():
    models = [tiny_model("llama", torch.float64, num_hidden_layers=2) for _ in range(2)]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", pp=2), num_microbatches=2)
        ids, labels = tiny_batch(batch=2, length=5)
        parallel.step(ids, targets=labels)
        parameters = list(parallel.module.parameters())
        if rank == 0:
            parameters[0].grad[0, 0] = math.inf
        before = [p.grad.clone() for p in parameters]
        with pytest.raises(GradientError, match="nonfinite-gradients"):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1, error_if_nonfinite=True)
        assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))

    run_ranks(2, body)


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize(
    ("axes", "zero"), [*SETTINGS, ({"dp": 2}, 2), ({"dp": 2}, 3), ({"dp": 2, "tp": 2}, 1)], ids=str
)
def test_a_scaler_decides_for_all_ranks(axes, zero, overflows, unscales):
    models = [tiny_model("llama", torch.float32, num_hidden_layers=2) for _ in range(math.prod(axes.values()))]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), zero=zero, num_microbatches=2)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        ids, labels = tiny_batch(batch=2, length=5)
        parallel.step(ids, targets=labels)
        if overflows and rank == len(models) - 1:
            next(local(p.grad) for p in stepped_by(optimizer) if local(p.grad).numel()).reshape(-1)[0] = math.inf
        before = [local(p.detach()).clone() for p in stepped_by(optimizer)]
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(local(p.detach()), b) for p, b in zip(stepped_by(optimizer), before, strict=True))
        assert same == overflows
        assert scaler.get_scale() == (2.0 if overflows else 4.0)

    run_ranks(len(models), body)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_a_scaler_of_an_optimizer_of_pytorch_decides_for_all_stages(axes, overflows):
    models = [tiny_model("llama", torch.float32, num_hidden_layers=2) for _ in range(math.prod(axes.values()))]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), num_microbatches=2)
        parameters = list(parallel.module.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        ids, labels = tiny_batch(batch=2, length=5)
        parallel.step(ids, targets=labels)
        if overflows and rank == len(models) - 1:
            local(parameters[0].grad).reshape(-1)[0] = math.inf
        before = [local(p.detach()).clone() for p in parameters]
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(local(p.detach()), b) for p, b in zip(parameters, before, strict=True)) == overflows
        assert scaler.get_scale() == (2.0 if overflows else 4.0)

    run_ranks(len(models), body)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_scales_the_gradients_of_an_optimizer_in_another_dtype(zero):
    """Sums in bfloat16, of which the optimizer has float32 copies: these are scaled, and stepped."""
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        options = {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
        model = shard_data(models[rank], build_mesh("cpu", dp=2), zero, **options)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=1.0)
        before = [local(p.detach()).clone() for p in stepped_by(optimizer)]
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        for parameter in stepped_by(optimizer):
            local(parameter.grad).zero_()
        optimizer.step()
        assert all(torch.equal(local(p.detach()), b) for p, b in zip(stepped_by(optimizer), before, strict=True))
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert not any(torch.equal(local(p.detach()), b) for p, b in zip(stepped_by(optimizer), before, strict=True))

    run_ranks(2, body)
