"""A backward whose gradients stay on one data rank is refused: of models without a reducer, and of copies of those with
one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from parallelize import (
    ModelError,
    build_mesh,
    build_optimizer,
    context_parallel,
    parallelize_model,
    parallelize_module,
    save_pretrained,
    shard_data,
)
from tests.support.models import tiny_model
from tests.support.refused import RULES, WIDTH, Block, refused, small_mesh
from tests.support.threads import run_ranks

HIDDEN = torch.randn(3, WIDTH)
RELOADS: dict[str, Callable[[nn.Module], Any]] = {
    "as it is": lambda model: None,
    "moved": lambda model: model.double(),
    "loaded": lambda model: model.load_state_dict(model.state_dict()),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
}


def backward(model: nn.Module) -> None:
    model(HIDDEN.to(next(model.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize("change", RELOADS)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 1}], ids=str)
def test_a_planned_model_without_a_reducer(axes, change):
    with small_mesh(**axes) as mesh:
        block = parallelize_module(Block(), mesh, RULES)
        RELOADS[change](block)
        with refused(ModelError, "unreduced-gradients", "shard_data", "fully_shard", "own_reduction=True"):
            backward(block)
        assert all(parameter.grad is None for parameter in (block.down.weight, block.down.bias))


def test_context_parallelism_alone():
    model = tiny_model("llama")

    def body(rank: int) -> None:
        sharded = context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2))
        with refused(ModelError, "unreduced-gradients", "shard_data", "own_reduction=True"):
            sharded(input_ids=torch.ones(2, 6, dtype=torch.int64)).logits.sum().backward()

    run_ranks(2, body)


def test_what_makes_such_a_model_train():
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=1)
        for zero in (0, 3):
            units = {"units": ["up", "down"]} if zero == 3 else {}
            backward(shard_data(parallelize_module(models[rank, zero], mesh, RULES), mesh, zero, **units))
        backward(fully_shard(parallelize_module(models[rank, 1], mesh, RULES), mesh=mesh["dp"]))
        backward(parallelize_module(models[rank, 2], mesh, RULES, own_reduction=True))

    initial = Block()
    models = {(rank, number): copy.deepcopy(initial) for rank in range(2) for number in range(4)}
    run_ranks(2, body)


@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 2}, {"tp": 2}], ids=str)
def test_a_mesh_without_other_data_ranks(axes):
    with small_mesh(**axes) as mesh:
        backward(parallelize_module(Block(), mesh, RULES))


def test_a_part_that_fully_shard_leaves_out():
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=1)
        block = parallelize_module(models[rank], mesh, RULES)
        fully_shard(block.down, mesh=mesh["dp"])
        with pytest.raises(ModelError, match="unreduced-gradients"):
            backward(block)

    run_ranks(2, body)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("change", RELOADS)
@pytest.mark.parametrize("part", ["", "down"], ids=["model", "part"])
@pytest.mark.parametrize("planned", [False, True], ids=["plain", "planned"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_copy_is_not_trained_in_silence(zero, planned, part, change):
    with small_mesh(dp=2, tp=1) as mesh:
        block = Block()
        block.down.bias.requires_grad_(False)
        if planned:
            parallelize_module(block, mesh, RULES)
        shard_data(block, mesh, zero)
        first = copy.deepcopy(block.get_submodule(part))
        for copied in (first, copy.deepcopy(first)):
            copied.requires_grad_()
            RELOADS[change](copied)
            hidden = torch.randn(3, 12 if part else WIDTH, dtype=next(copied.parameters()).dtype)
            with refused(ModelError, "unreduced-gradients", "deep copy", "shard_data", "requires_grad_(False)"):
                copied(hidden).sum().backward()


def test_a_copy_that_is_not_trained_is_a_plain_model():
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, 1, dtype=torch.bfloat16)
        copied = copy.deepcopy(block)
        other = {name: torch.randn_like(value) for name, value in block.state_dict().items()}
        copied.load_state_dict(other)
        assert all(torch.equal(value, other[name]) for name, value in copied.state_dict().items())
        with torch.no_grad():
            assert torch.isfinite(copied(HIDDEN.bfloat16())).all()
        hidden = HIDDEN.bfloat16().requires_grad_()
        copied.requires_grad_(False)(hidden).sum().backward()  # a teacher, through which gradients pass
        assert hidden.grad is not None


def test_a_copy_that_is_sharded_trains():
    initial = Block().double()
    models = [copy.deepcopy(initial) for _ in range(2)]
    reference = copy.deepcopy(initial)
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for rank in range(2):
        reference(hidden[rank]).sum().backward()

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        student = copy.deepcopy(shard_data(models[rank], mesh, 1))
        shard_data(student, mesh, 1)
        optimizer = build_optimizer(student, torch.optim.SGD, lr=0.1)
        student(hidden[rank]).sum().backward()
        for name, parameter in student.named_parameters():
            assert torch.allclose(parameter.grad, reference.get_parameter(name).grad, rtol=1e-12)
        optimizer.step()
        assert torch.equal(models[rank].up.weight, initial.up.weight)

    run_ranks(2, body)


def test_a_copy_is_saved_for_transformers(tmp_path):
    initial = tiny_model("llama", torch.float32)
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=1, dtype=torch.bfloat16)
        average = copy.deepcopy(parallel.module)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(0.5)
        save_pretrained(average, tmp_path / "average")
        with pytest.raises(ModelError, match="not-copyable"):
            copy.deepcopy(parallel)

    run_ranks(2, body)
    loaded = type(initial).from_pretrained(tmp_path / "average")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, initial.get_parameter(name).bfloat16().mul(0.5).to(parameter.dtype)), name
