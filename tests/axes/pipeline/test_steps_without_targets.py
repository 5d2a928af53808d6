"""A batch, a microbatch or a data rank without any target: gradients of zero, whatever computes the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from parallelize import build_mesh, linear_cross_entropy, parallelize_model
from tests.support.context import alone, batch_of, error_of, family, on_mesh
from tests.support.threads import run_ranks

IDS, TARGETS = batch_of(8, 4)
NONE = torch.full_like(IDS, -100)


def masked(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return (output.logits.square().mean(-1) * (targets != -100)).sum()


OWN = dict(loss=masked, count=lambda targets: (targets != -100).sum())
FUSED, SHARDED = dict(fuse_loss=True), dict(loss_parallel=True)
CASES = [({"dp": 2}, {}), ({"dp": 2}, FUSED), ({"tp": 2}, SHARDED), ({"tp": 2}, FUSED), ({"pp": 2}, FUSED)]
CASES += [({"cp": 2}, {}), ({"cp": 2}, FUSED), ({"dp": 2}, OWN), ({"pp": 2}, OWN), ({"dp": 2}, FUSED | {"zero": 3})]


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(("axes", "options"), CASES)
def test_a_batch_without_targets_leaves_the_weights(axes, options):
    model = family("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", **axes), num_microbatches=2, **options)
        rows = slice(2 * rank, 2 * rank + 2) if "dp" in axes else slice(None)
        loss = parallel.step(input_ids=IDS[rows], targets=NONE[rows])
        gradients = [p.grad for p in parallel.module.parameters() if p.grad is not None]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients]
        return bool(loss.isnan()), len(local) > 0, all(bool((grad == 0).all()) for grad in local)

    assert run_ranks(2, body) == [(True, True, True)] * 2


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("empty", [slice(0, 2), slice(2, 3)], ids=["a data rank", "a microbatch"])
@pytest.mark.parametrize("options", [{}, FUSED])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2}], ids=lambda axes: "x".join(axes))
def test_a_part_without_targets_adds_nothing(axes, options, empty):
    model, targets = family("llama"), TARGETS.clone()
    targets[empty] = -100
    expected = alone(model, IDS, targets)

    def body(rank):
        return on_mesh(model, axes, IDS, targets, {}, num_microbatches=2, **options)

    for results in run_ranks(2, body):
        error, where = error_of(results, expected)
        assert error < 1e-12, where


def test_a_sum_over_no_token_has_no_gradient_however_it_is_scaled():
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 10))
    loss = linear_cross_entropy(hidden, weight, NONE.flatten()[:6], reduction="sum", z_loss=0.1) / 0
    for _ in range(2):  # the second recomputes the logits
        hidden.grad = weight.grad = None
        loss.backward(retain_graph=True)
        assert not hidden.grad.any() and not weight.grad.any()
