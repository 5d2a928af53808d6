"""PyTorch's own optimizers and calls that clip, where some parameters are plain, infinite or of another dtype, and on
two meshes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import (
    GradientError,
    ModelError,
    build_mesh,
    build_optimizer,
    next_tokens,
    parallelize_model,
    parallelize_module,
    shard_data,
)
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.refused import WIDTH, Block
from tests.support.threads import run_ranks


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Partly(nn.Module):
    """Of which a dict plans two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.c_fc, self.c_proj = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.ln, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        return self.head(self.ln(x + self.c_proj(torch.relu(self.c_fc(x)))))


OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9}),
]


def test_optimizers_of_pytorch_beside_a_dict_of_some_layers():
    """Plain parameters and DTensors in one list: clipped, stepped by multi-tensor kernels, and averaged."""
    initial = Partly().double()
    ids, _ = tiny_batch(batch=2, length=5)
    ids = ids % 32

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", tp=2)
        for kind, options in OPTIMIZERS:
            model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
            parallelize_module(model, mesh, {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})
            average = torch.optim.swa_utils.AveragedModel(reference, use_buffers=True)
            pair = [(m, kind(m.parameters(), lr=0.1, **options)) for m in (model, reference)]
            for _ in range(2):
                norms = []
                for net, optimizer in pair:
                    net(ids).square().mean().backward()
                    norms.append(full(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
                    optimizer.step()
                    optimizer.zero_grad()
                torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0)
            average.update_parameters(reference)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(full(value), reference.state_dict()[name], rtol=1e-9, atol=1e-10)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_kernels_that_pytorch_has_not_for_shards_are_named(kind):
    initial = Partly()

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        parallelize_module(model, build_mesh("cpu", tp=2), {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})
        model(torch.ones(1, 2, dtype=torch.long)).sum().backward()
        with pytest.raises(ModelError, match="unsharded-optimizer"):
            kind(model.parameters(), lr=0.1, fused=True).step()
        build_optimizer(model, kind, lr=0.1, fused=True).step()

    run_ranks(2, body)


def test_two_models_on_two_meshes():
    """Equal meshes have groups of their own, and PyTorch gives a gradient those of either."""
    sizes = {"n_routed_experts": 8, "num_hidden_layers": 4}
    unsharded = tiny_model("deepseek_v3", torch.float64, **sizes)
    models = [[copy.deepcopy(unsharded) for _ in range(2)] for _ in range(4)]
    ids, _ = tiny_batch(batch=4, length=6)
    targets = next_tokens(ids)
    loss_of(unsharded(ids).logits, targets).backward()
    expected = nn.utils.get_total_norm([p.grad for p in unsharded.parameters() if p.grad is not None])

    def body(rank: int) -> torch.Tensor:
        first, second = models[rank]
        parallelize_model(first, build_mesh("cpu", pp=2, tp=2), num_microbatches=2).step(ids, targets=targets)
        mesh = build_mesh("cpu", dp=2, tp=2)
        parallel = parallelize_model(second, mesh, zero=3)
        part = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
        parallel.step(ids[part], targets=targets[part])
        return parallel.clip_grad_norm_(1.0)

    for norm in run_ranks(4, body):
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)


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


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_scales_the_gradients_of_an_optimizer_in_another_dtype(zero):
    """Sums in bfloat16, of which the optimizer has float32 copies: these are scaled, and stepped."""
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        options = {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
        model = shard_data(models[rank], build_mesh("cpu", dp=2), zero, **options)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=1.0)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [local(p.detach()).clone() for p in stepped]
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        for parameter in stepped:
            local(parameter.grad).zero_()
        optimizer.step()
        assert all(torch.equal(local(p.detach()), b) for p, b in zip(stepped, before, strict=True))
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert not any(torch.equal(local(p.detach()), b) for p, b in zip(stepped, before, strict=True))

    run_ranks(2, body)
