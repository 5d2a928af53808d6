"""The central comparison: a planned model against the same model unsharded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ShardedLogits, build_mesh, cross_entropy, full_gradients, full_parameter, parallelize_module
from tests.support import device

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
LEARNING_RATE = 0.05


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative error and its name: max |a - b| over max |b|, floored at 1e-3 of the largest tensor's.

    Compared on the CPU, where full state dicts are.
    """
    actual, expected = device.on_cpu(actual), device.on_cpu(expected)
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    floor = 1e-3 * max((float(b.abs().max()) for b in expected.values() if b.numel()), default=0.0)
    errors = {
        name: float((actual[name] - b).abs().max()) / max(float(b.abs().max()), floor, 1e-30)
        for name, b in expected.items()
        if b.numel()
    }
    name = max(errors, key=errors.__getitem__)
    assert all(error == error for error in errors.values()), "a value is not a number"
    return errors[name], name


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that preserves the dtype, of full or sharded logits."""
    if isinstance(logits, ShardedLogits):
        return cross_entropy(logits, labels)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def reference_run(model: nn.Module, batches: list, steps: int = 3) -> dict[str, Any]:
    """Logits, loss, gradients after one and two backward passes, weights after SGD, all unsharded."""
    model = copy.deepcopy(model)
    out = _run(
        model,
        batches,
        steps,
        lambda: _grads(model),
        lambda: {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    return out


def planned_run(
    model: nn.Module, tp: int, batches: list, steps: int = 3, plan: Any = None, **options: Any
) -> dict[str, Any]:
    """The same for a model that is parallelized here; call it on every rank."""
    mesh = build_mesh("cpu", tp=tp)
    parallelize_module(model, mesh, plan, **options)
    names = [name for name, _ in model.named_parameters()]
    return _run(
        model, batches, steps, lambda: full_gradients(model), lambda: {n: full_parameter(model, n) for n in names}
    )


def _run(model: nn.Module, batches: list, steps: int, grads: Any, weights: Any) -> dict[str, Any]:
    (ids, labels), (ids2, labels2) = batches
    with torch.no_grad():
        inference = _full(model(input_ids=ids).logits)
    inputs = _input_gradient(model, ids, labels)
    logits = model(input_ids=ids).logits
    loss = loss_of(logits, labels)
    loss.backward()
    results = {
        "inference": inference,
        "inputs": inputs,
        "logits": _full(logits).detach(),
        "loss": loss.detach(),
        "grads": grads(),
    }
    loss_of(model(input_ids=ids2).logits, labels2).backward()
    results["grads twice"] = grads()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    for _ in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model(input_ids=ids).logits, labels).backward()
    results["weights"] = weights()
    return results


def _input_gradient(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss with respect to embedded inputs; parameters are left without gradients."""
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(7)
    embeds = torch.randn((*ids.shape, model.config.hidden_size), generator=generator).to(parameter.dtype)
    embeds.requires_grad_()
    loss_of(model(inputs_embeds=embeds).logits, labels).backward()
    model.zero_grad()
    return embeds.grad


def _full(logits: torch.Tensor) -> torch.Tensor:
    return logits.full_tensor() if isinstance(logits, ShardedLogits) else logits


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(actual: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> None:
    """Assert that everything is equal to rounding."""
    bound = TOLERANCE[dtype]
    for key in ("inference", "logits", "loss", "inputs"):
        error, _ = worst({key: actual[key]}, {key: expected[key]})
        assert error <= bound, f"{key} differs by {error:.2e}"
    for key in ("grads", "grads twice", "weights"):
        error, name = worst(actual[key], expected[key])
        assert error <= bound, f"{key}: {name} differs by {error:.2e}"
