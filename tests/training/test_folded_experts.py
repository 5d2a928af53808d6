"""Experts folded over data axes, with ranks as threads: steps of an optimizer equal those of the unsharded model."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks

DATA_AXES = ("dp_replicate", "dp")
LARGEST_NORM = 0.3


def unsharded_steps(model, batches):
    """(loss, gradients, norm) of each step."""
    optimizer, results = torch.optim.SGD(model.parameters(), 0.05), []
    for ids, labels in batches:
        loss = loss_of(model(input_ids=ids).logits, labels)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.detach(), gradients, norm))
    return results


def rows_of(mesh, axes, count):
    """The samples of this rank."""
    data_rank = 0
    for axis in DATA_AXES:
        if axis in axes:
            data_rank = data_rank * axes[axis] + mesh.get_local_rank(axis)
    return slice(count * data_rank, count * (data_rank + 1))


def check(model, axes, options, per_rank=2, length=7):
    """Losses, gradients and norms of three steps, and the weights after them.

    Args:
        per_rank: samples of a data rank in a microbatch.
    """
    count = per_rank * (options.get("num_microbatches") or 1)
    total = count * prod(axes.get(axis, 1) for axis in DATA_AXES)
    batches = [tiny_batch(batch=total, length=length, seed=seed) for seed in range(3)]
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]
    expected = unsharded_steps(model, batches)

    def body(rank):
        mesh, local = build_mesh("cpu", **axes), models[rank]
        parallel = parallelize_model(local, mesh, **options)
        optimizer, rows = parallel.optimizer(torch.optim.SGD, lr=0.05), rows_of(mesh, axes, count)
        for (ids, labels), (expected_loss, expected_gradients, expected_norm) in zip(batches, expected, strict=True):
            loss = parallel.step(ids[rows], targets=labels[rows])
            trained = {name: p for name, p in local.named_parameters() if name in expected_gradients}
            others = {
                name: p.grad for name, p in local.named_parameters() if name not in trained and p.grad is not None
            }
            assert not any(full_value(local, name, grad).any() for name, grad in others.items())  # None if unsharded
            gradients = {name: full_value(local, name, p.grad).clone() for name, p in trained.items()}
            norm = parallel.clip_grad_norm_(LARGEST_NORM)
            assert abs(loss - expected_loss) <= 1e-12 * expected_loss
            error, name = worst(gradients, {name: expected_gradients[name] for name in gradients})
            assert error <= 1e-12, (name, error)
            assert abs(norm - expected_norm) <= 1e-12 * expected_norm
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: full_value(local, name, p) for name, p in local.named_parameters()}
        assert worst(weights, {name: model.get_parameter(name).detach() for name in weights})[0] <= 1e-12

    run_ranks(len(models), body)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"defer": True}], ids=str)
def test_zero_2_with_copies_of_experts_on_replicas_alone(options):
    """What `dp` splits of dense parameters is reduced in each backward; experts, which it does not split, once per
    step."""
    axes = {"dp_replicate": 2, "dp": 2}
    check(tiny_model("mixtral", torch.float64), axes, {"ep": 2, "zero": 2, "num_microbatches": 2, **options})


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp_replicate": 2, "dp": 2}], ids=str)
def test_zero_3_with_one_copy_of_each_expert_in_recomputed_layers(axes):
    """Their unit gathers nothing, and runs other ops of `fully_shard` in a replay than in the forward."""
    check(tiny_model("mixtral", torch.float64), axes, {"ep": 2, "zero": 3, "recompute": "selective"})


@pytest.mark.sweep
def test_experts_and_dense_parameters_in_groups_of_other_ranks():
    """Each sums its gradients over groups along two axes. Ranks make these as they reach the first parameter of each
    kind."""
    options = {"ep": 2, "zero": 1, "sequence_parallel": True}
    check(tiny_model("qwen2_moe", torch.float64), {"dp": 2, "cp": 2, "tp": 2}, options)


INSIDE = [
    ({"dp": 4}, {"ep": 2, "zero": 3, "overlap": "chunked", "recompute": "full"}),
    ({"dp": 4}, {"ep": 2, "zero": 1, "num_microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 2, "sequence_parallel": True}),
    ({"cp": 2, "tp": 2}, {"ep": 4, "sequence_parallel": True}),
    ({"pp": 2, "dp": 2}, {"ep": 2, "num_microbatches": 2}),
]


@pytest.mark.variants(every=10)
@pytest.mark.parametrize(("axes", "options"), INSIDE, ids=str)
@pytest.mark.parametrize("family", ["dbrx", "jetmoe"])
def test_experts_with_weights_in_modules_inside(family, axes, options):
    """With ZeRO 3 these modules are its units, whose order a rank without tokens keeps."""
    more = {"tie_word_embeddings": False} if family == "jetmoe" else {}
    check(tiny_model(family, torch.float64, **more), axes, options, length=8)


SPLIT = [
    ({"dp": 4}, {"ep": 2, "etp": 2}),
    *(({"dp": 4}, {"etp": 2, "zero": zero, "num_microbatches": 2}) for zero in (0, 1, 2)),
    ({"dp": 4}, {"etp": 2, "zero": 2, "defer": True, "num_microbatches": 2, "overlap": "chunked"}),
    ({"dp": 4}, {"etp": 2, "zero": 3, "num_microbatches": 2, "recompute": "selective"}),
    ({"dp_replicate": 2, "dp": 2}, {"etp": 2, "zero": 1}),
    ({"dp_replicate": 2, "dp": 2}, {"etp": 2, "zero": 3}),
    ({"dp": 2, "tp": 2}, {"ep": 2, "etp": 2, "zero": 2, "sequence_parallel": True, "loss_parallel": True}),
    ({"dp": 2, "tp": 2}, {"etp": 2, "zero": 3, "recompute": "full"}),
    ({"dp": 4, "tp": 2}, {"ep": 2, "etp": 2, "zero": 1}),
    ({"dp": 4, "tp": 2}, {"ep": 2, "etp": 2, "zero": 3, "sequence_parallel": True}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"ep": 2, "etp": 2, "zero": 1, "sequence_parallel": True}),
    ({"dp": 2, "cp": 2}, {"etp": 2, "zero": 3}),
]


@pytest.mark.variants(every=13)
@pytest.mark.parametrize(("axes", "options"), SPLIT, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_that_are_split_too(family, axes, options):
    """Gradients, weights, and the norm, which counts each part of an expert once."""
    check(tiny_model(family, torch.float64), axes, options, length=8)
