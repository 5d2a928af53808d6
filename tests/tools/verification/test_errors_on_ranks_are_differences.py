"""Errors and missing gradients on ranks are differences; models without targets and losses that are no sums are
served."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelize import ParallelModel, Verification, assert_verified, verify
from parallelize.base.errors import ModelError
from tests.tools.verification.towers import RULES, tower


def difference_of(result: Verification) -> str:
    assert not result.ok and result.difference is not None
    return str(result.difference)


def test_a_clip_that_fails_on_one_rank_is_a_difference(monkeypatch):
    stock = ParallelModel.clip_grad_norm_

    def wrong(self, *args):
        if dist.get_rank() == 1:
            raise ValueError("clipping broke")
        return stock(self, *args)

    monkeypatch.setattr(ParallelModel, "clip_grad_norm_", wrong)
    text = difference_of(verify("llama", mesh="tp=2", sequence_parallel=True))
    assert "clip_grad_norm_" in text and "clipping broke" in text


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_gradient_that_is_missing_is_a_difference(monkeypatch, ranks):
    stock = ParallelModel.step

    def wrong(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        if dist.get_rank() in ranks:
            self.module.lm_head.weight.grad = None
        return loss

    monkeypatch.setattr(ParallelModel, "step", wrong)
    assert "lm_head" in difference_of(verify("llama", mesh="tp=2", sequence_parallel=False))


@pytest.mark.sweep
def test_a_model_that_cannot_be_parallelized_on_one_rank_is_a_difference(monkeypatch):
    from parallelize.tools.verification import mesh_step as run

    stock = run.parallelize_model

    def wrong(*args, **kwargs):
        if dist.get_rank() == 1:
            raise AttributeError("no such thing")
        return stock(*args, **kwargs)

    monkeypatch.setattr(run, "parallelize_model", wrong)
    assert "no such thing" in difference_of(verify("llama", mesh="tp=2", sequence_parallel=False))


@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {}), ("dp=2", {"zero": 2}), ("tp=2", {"num_microbatches": 2})])
def test_a_model_without_targets(mesh, options):
    def squares():
        made = tower(loss=lambda output, targets: (output**2).sum())
        return {**made, "inputs": lambda batch, sequence: {"x": torch.randn(batch, sequence, 12)}}

    assert_verified(squares, RULES, mesh, **options)


def test_a_loss_that_is_no_sum():
    def mean(weight=0.5):
        return tower(loss=lambda output, targets: weight * F.cross_entropy(output.flatten(0, 1), targets.flatten()))

    result = assert_verified(mean, RULES, "tp=2")
    assert any("several microbatches" in text for text in result.unseen)
    with pytest.raises(ModelError, match="loss-no-sum"):
        verify(mean, RULES, "dp=2")
    stock = lambda: tower(loss=lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten()))  # noqa: E731
    assert "loss-no-sum" in difference_of(verify(stock, RULES, mesh="tp=2"))  # which a step refuses


def test_small_differences_have_no_kind(monkeypatch):
    """Off by more than the bound, and by less than what kinds are named by."""
    stock = ParallelModel.step

    def wrong(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        for parameter in self.module.parameters():
            parameter.grad.mul_(1 + 1e-12)
        return loss

    monkeypatch.setattr(ParallelModel, "step", wrong)
    result = verify(tower, RULES, "dp=2")
    assert not result.ok and result.difference is not None
    assert result.difference.kind not in ("whole", "shard", "slices")
