"""Norms and clipping are those of the unsharded model on every mesh, through every door."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import (
    ModelError,
    build_mesh,
    build_optimizer,
    clip_grad_norm_,
    full_gradients,
    next_tokens,
    parallelize_model,
    parallelize_module,
)
from tests.axes.zero.test_one_gradient import full, stepped_by
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks

MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"cp": 2}, {}),
    ({"pp": 2}, {}),
    *[({"dp": 2}, {"zero": zero}) for zero in range(4)],
    *[({"dp": 2, "tp": 2}, {"zero": zero}) for zero in (1, 3)],
    ({"cp": 2, "tp": 2}, {}),
    ({"pp": 2, "dp": 2}, {"zero": 2}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"zero": 1}),
    *[({"dp_replicate": 2, "dp": 2}, {"zero": zero}) for zero in range(4)],
    *[({"dp": 2}, {"zero": zero, "ep": 2}) for zero in range(4)],
    ({"dp": 2, "tp": 2}, {"zero": 1, "ep": 2}),
]


def data_part(mesh: Any) -> tuple[int, int]:
    """(index, number) of this rank's part of the batch."""
    index, number = 0, 1
    for axis in ("dp_replicate", "dp"):
        if axis in mesh.mesh_dim_names:
            index, number = index * mesh[axis].size() + mesh.get_local_rank(axis), number * mesh[axis].size()
    return index, number


def doors(parallel: Any, optimizer: Any) -> dict[str, Any]:
    """Each clips to a norm, and returns the norm before."""
    stock, parameters = nn.utils.clip_grad_norm_, list(parallel.module.parameters())

    def unscaled(most: float, order: float) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        return stock(parameters, most, order)

    def by_parts(most: float, order: float) -> Any:
        norm = full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], order))
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    return {
        "parallel": parallel.clip_grad_norm_,
        "model": lambda most, order: clip_grad_norm_(parallel.module, most, order),
        "optimizer": lambda most, order: clip_grad_norm_(stepped_by(optimizer), most, order),
        "torch": lambda most, order: stock(parameters, most, order),
        "torch, one by one": lambda most, order: stock(parameters, most, order, foreach=False),
        "torch, lists": lambda most, order: stock(parameters, most, order, foreach=True),
        "torch, optimizer": lambda most, order: stock(stepped_by(optimizer), most, order),
        "unscaled": unscaled,
    } | ({} if "pp" in parallel.mesh.mesh_dim_names else {"parts": by_parts})


@pytest.mark.variants(every=7)
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
def test_norms_through_every_door(axes, options):
    unsharded = tiny_model("mixtral" if "ep" in options else "qwen2", torch.float64, num_hidden_layers=2)
    models = [copy.deepcopy(unsharded) for _ in range(math.prod(axes.values()))]
    ids, _ = tiny_batch(batch=8, length=6)
    targets = next_tokens(ids)
    loss_of(unsharded(ids).logits, targets).backward()
    reference = {name: p.grad for name, p in unsharded.named_parameters()}

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), num_microbatches=2, **options)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        index, number = data_part(parallel.mesh)
        part = slice(8 // number * index, 8 // number * (index + 1))
        parallel.step(ids[part], targets=targets[part])
        gradients = {name: g.clone() for name, g in reference.items()}
        most = 2.0
        for door, clip in doors(parallel, optimizer).items():
            for order in (2.0, math.inf):
                norm = full(clip(most, order))
                expected = nn.utils.get_total_norm(list(gradients.values()), order)
                torch.testing.assert_close(norm.double(), expected, rtol=1e-10, atol=0, msg=f"{door} {order}")
                nn.utils.clip_grads_with_norm_(_with_gradients(gradients), most, expected)
                most *= 0.7
        nn.utils.clip_grad_value_(parallel.module.parameters(), 1e-3)
        clamped = {name: gradient.clamp(-1e-3, 1e-3) for name, gradient in gradients.items()}
        expected = nn.utils.get_total_norm(list(clamped.values()))
        torch.testing.assert_close(parallel.clip_grad_norm_(1e9), expected, rtol=1e-9, atol=0)
        if axes != {"dp_replicate": 2, "dp": 2}:
            for name, value in full_gradients(parallel.module).items():
                torch.testing.assert_close(value, clamped[name], rtol=1e-9, atol=1e-14)

    run_ranks(len(models), body)


def _with_gradients(gradients: dict[str, torch.Tensor]) -> list[Any]:
    parameters = [nn.Parameter(torch.empty_like(g)) for g in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient
    return parameters


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
