"""Gradients read through the model and through the optimizer are the same numbers, whoever edits them, at every ZeRO
stage."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import (
    build_mesh,
    build_optimizer,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    parallelize_module,
    shard_data,
)
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Rows that two ranks do not divide, and one row alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def rows(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[rank]


def in_place(parameters: list[Any], _: Any) -> None:
    for p in parameters:
        p.grad.mul_(0.5)


def replaced(parameters: list[Any], _: Any) -> None:
    for p in parameters:
        p.grad = p.grad * 0.5


def with_weights(parameters: list[Any], _: Any) -> None:
    """Only what an optimizer has: under ZeRO 2 a model's gradient is a shard, and its weight is not."""
    for p in parameters:
        p.grad.add_(p.detach(), alpha=0.1)


def values(parameters: list[Any], _: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.3)


def unscaled(_: list[Any], optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def clipped_by_torch(parameters: list[Any], _: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False)


def removed(parameters: list[Any], _: Any) -> None:
    parameters[1].grad = None


EDITS: list[Callable[[list[Any], Any], None]] = [in_place, replaced, values, unscaled, clipped_by_torch, removed]


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(model: nn.Module, optimizer: Any, reference: nn.Module, tolerance: float) -> None:
    """Norms through every door, and each gradient through the model and through the optimizer."""
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    expected = nn.utils.get_total_norm([g for g in gradients.values() if g is not None])
    for source in (model, list(model.parameters()), stepped_by(optimizer)):
        torch.testing.assert_close(clip_grad_norm_(source, 1e9).double(), expected.double(), rtol=tolerance, atol=0)
    for source in (list(model.parameters()), stepped_by(optimizer)):
        norm = full(nn.utils.clip_grad_norm_(source, 1e9))
        torch.testing.assert_close(norm.double(), expected.double(), rtol=tolerance, atol=0)
        for p, expected_grad in zip(source, gradients.values(), strict=True):
            assert (p.grad is None) == (expected_grad is None)
            if expected_grad is not None:
                torch.testing.assert_close(
                    full(p.grad).double(), expected_grad.double(), rtol=tolerance, atol=tolerance
                )
    actual = full_gradients(model)
    for name, expected_grad in gradients.items():
        if expected_grad is not None:
            torch.testing.assert_close(actual[name].double(), expected_grad.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_whoever_edits_gradients_edits_those_of_both(zero):
    initial = net()

    def body(rank: int) -> None:
        model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
        shard_data(model, build_mesh("cpu", dp=2), zero)
        pair = (build_optimizer(model, torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), 0.1))
        for edit in [*EDITS, with_weights]:
            for from_optimizer in [True] if edit is with_weights else [True, False]:
                model(rows(rank)).pow(2).sum().backward()
                sum(reference(rows(r)).pow(2).sum() for r in range(2)).backward()
                edit(stepped_by(pair[0]) if from_optimizer else list(model.parameters()), pair[0])
                edit(list(reference.parameters()), pair[1])
                compare(model, pair[0], reference, 1e-11)
                model(rows(1 - rank)).pow(2).sum().backward()  # adds to what was edited
                sum(reference(rows(r)).pow(2).sum() for r in range(2)).backward()
                compare(model, pair[0], reference, 1e-11)
                for optimizer in pair:
                    optimizer.step()
                    optimizer.zero_grad()
        for name, value in full_state_dict(model, every_rank=True).items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-11, atol=1e-11)

    run_ranks(2, body)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_edits_of_sums_in_a_narrower_dtype(zero, narrow):
    """The optimizer steps float32 copies: what scales gradients scales them in float32, wherever they are read
    afterwards."""
    initial = net(torch.float32)

    def body(rank: int) -> None:
        model = shard_data(
            copy.deepcopy(initial),
            build_mesh("cpu", dp=2),
            zero,
            dtype=narrow,
            reduce_dtype=narrow,
            check_replicated=False,
        )
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
        for edit in (unscaled, replaced, in_place, clipped_by_torch):
            reference = copy.deepcopy(initial)
            model(rows(rank).to(narrow)).pow(2).sum().backward()
            for name, gradient in full_gradients(model).items():
                reference.get_parameter(name).grad = gradient.float()
            edit(stepped_by(optimizer), optimizer)
            edit(list(reference.parameters()), torch.optim.SGD(reference.parameters()))
            compare(model, optimizer, reference, 1e-6)
            optimizer.zero_grad()
            assert all(p.grad is None for p in [*model.parameters(), *stepped_by(optimizer)])

    run_ranks(2, body)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("source", ["model", "optimizer"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_edits_of_gradients_that_tp_shards_too(zero, source):
    """With packed weights, whose shards no placement of PyTorch describes."""
    unsharded = tiny_model("phi3", torch.float64, num_hidden_layers=1)
    models = [copy.deepcopy(unsharded) for _ in range(4)]
    ids, labels = tiny_batch(batch=4, length=5)
    loss_of(unsharded(ids).logits, labels).backward()
    expected_norm = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=2)
        model = shard_data(parallelize_module(models[rank], mesh), mesh, zero)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
        part = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
        weight = (labels[part] != -100).sum().double() / (labels != -100).sum()
        (loss_of(model(ids[part]).logits, labels[part]) * 4 * weight).backward()
        unscaled([], optimizer)
        doors = {"model": list(model.parameters()), "optimizer": stepped_by(optimizer)}
        assert math.isclose(clip_grad_norm_(doors[source], 0.5), expected_norm, rel_tol=1e-10)
        for door in doors.values():
            assert math.isclose(clip_grad_norm_(door, 1e9), 0.5, rel_tol=1e-5)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, unsharded.get_parameter(name).grad, rtol=1e-9, atol=1e-12)

    run_ranks(4, body)
