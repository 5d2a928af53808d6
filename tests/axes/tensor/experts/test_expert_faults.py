"""Faults of one rank in a mixture whose experts are over `ep`: right, or an error on every rank with the name of the
layer."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ModelError, build_mesh, parallelize_model, parallelize_module, shard_data
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.axes.tensor.experts import expert_jobs as jobs
from tests.axes.tensor.experts.test_expert_tensor_parallel import PLAN, Mixture
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

DIFFERENCES = {"choices": "4 choices of a token of width 48", "dtype": "float64 tokens and float32 weights"}


def assert_named(errors, change):
    for error in errors:
        assert "experts-differ: model.layers.1.mlp.experts is called in one way" in error, error
        assert DIFFERENCES[change] in error, error


@pytest.mark.parametrize("change", DIFFERENCES)
@pytest.mark.parametrize("axis", jobs.AXES)
def test_ranks_whose_rows_would_differ_in_size(axis, change):
    model = tiny_model("mixtral", torch.float64)
    assert_named(run_ranks(2, lambda rank: jobs.faulty_step(rank, axis, change, model)), change)


@pytest.mark.variants(every=8)
@pytest.mark.processes
@pytest.mark.parametrize("change", ["choices", "dtype", "nan", "range"])
@pytest.mark.parametrize("axis", jobs.FOUR)
def test_four_processes_of_which_one_is_wrong(four_processes, axis, change):
    """Messages of rows that differ in size would not fit together, and one would wait until the timeout of the
    group."""
    results = four_processes.run(jobs.faulty_step, axis, change, timeout_s=60)
    if change in DIFFERENCES:
        assert_named(results, change)
    elif change == "nan":
        assert results == ["nan"] * 4
    else:
        named = "bad-choice: model.layers.1.mlp.experts got choices outside of [0, 6)"
        assert all(named in error and "such as 17" in error for error in results), results


@pytest.mark.on_cpus("over NCCL the rank whose batch is not empty waits until the group's timeout")
@pytest.mark.processes
def test_processes_of_which_one_has_an_empty_batch(two_processes):
    """What ranks agree on before a step finds it; without that check, one would wait until the timeout of the group."""
    errors = two_processes.run(jobs.faulty_step, "dp", "empty", timeout_s=60)
    assert all("indivisible-batch" in error for error in errors), errors


@pytest.mark.parametrize("axis", jobs.AXES)
def test_a_router_that_is_not_a_number(axis):
    """As in the unsharded model, the loss is not a number: on every rank, without an error or a wait."""
    model = tiny_model("mixtral", torch.float64)
    assert run_ranks(2, lambda rank: jobs.faulty_step(rank, axis, "nan", model)) == ["nan", "nan"]


def test_ranks_in_other_layers():
    """Of equal shapes: their messages would fit together, and the results be wrong."""
    models = [tiny_model("mixtral", torch.float64) for _ in range(2)]
    ids, _ = tiny_batch(length=8)

    def body(rank):
        parallelize_model(models[rank], build_mesh("cpu", dp=2), ep=2)
        if rank == 1:
            models[rank].model.layers[0].mlp.forward = lambda tokens: tokens
        named = rf"experts-differ: model.layers.{rank}.mlp.experts is[\s\S]*rank {1 - rank} *other experts"
        with pytest.raises(ModelError, match=named):
            models[rank](input_ids=ids)

    run_ranks(2, body)


def test_ranks_of_which_one_has_no_backward():
    models = [copy.deepcopy(tiny_model("mixtral", torch.float64)) for _ in range(2)]
    ids, _ = tiny_batch(length=8)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), ep=2, check_replicated=False)
        with (
            torch.set_grad_enabled(rank == 0),
            pytest.raises(ModelError, match=r"rank 1 *2 choices.*without gradients"),
        ):
            models[rank](input_ids=ids)

    run_ranks(2, body)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_rank_without_tokens(zero):
    """It computes for the others. (The attention of `transformers` refuses an empty batch itself.)"""
    torch.manual_seed(0)
    model, tokens = Mixture().double(), torch.randn(5, 4, dtype=torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]
    model(tokens).square().sum().backward()

    def body(rank):
        mesh = build_mesh("cpu", dp=2, tp=1)
        local = shard_data(parallelize_module(models[rank], mesh, PLAN, ep=2), mesh, zero=zero, units=["experts"])
        local(tokens if rank == 0 else tokens[:0]).square().sum().backward()
        return {name: full_value(local, name, p.grad) for name, p in local.named_parameters()}

    for gradients in run_ranks(2, body):
        assert worst(gradients, {name: p.grad for name, p in model.named_parameters()})[0] <= 1e-12


def test_an_empty_batch_of_a_step_is_an_error_on_every_rank():
    models = [tiny_model("mixtral", torch.float64) for _ in range(2)]
    ids, labels = tiny_batch(batch=2, length=8)

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), ep=2)
        rows = slice(0, 2 - 2 * rank)
        with pytest.raises(Exception, match="indivisible-batch"):
            parallel.step(ids[rows], targets=labels[rows])
        assert not any(p.grad is not None for p in models[rank].parameters())

    run_ranks(2, body)
