"""Steps of models with experts on a mesh, with ranks as threads, beside those of the unsharded model."""

from __future__ import annotations

import copy
from math import prod

import torch

from parallelize import build_mesh, parallelize_model
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support.models import tiny_batch
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
