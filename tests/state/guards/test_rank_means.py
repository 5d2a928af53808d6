"""A mean over one rank's targets is no loss of several data ranks, whose gradients are summed: it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, PipelineError, build_mesh, cross_entropy, parallelize_model, valid_tokens
from tests.support.models import tiny_batch, tiny_model
from tests.support.refused import Block, refused
from tests.support.threads import run_ranks

T = torch.Tensor
IDS, LABELS = tiny_batch(batch=4, length=8)
MODEL = tiny_model("llama", torch.float64)


def _of(loss: Callable[[T, T], T]) -> Callable[[Any, Any], None]:
    def backward(parallel: Any, mesh: Any) -> None:
        logits = parallel.module(input_ids=IDS, use_cache=False).logits
        loss(logits, LABELS).backward()

    return backward


MEANS = {
    "flat": _of(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())),
    "classes second": _of(lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels)),
    "criterion": _of(lambda logits, labels: nn.CrossEntropyLoss()(logits.float().view(-1, 67), labels.view(-1))),
    "of probabilities": _of(lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())),
    "of the package": _of(lambda logits, labels: cross_entropy(logits, labels)),
    "squares": _of(lambda logits, labels: F.mse_loss(logits, torch.zeros_like(logits))),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_over_a_rank_is_refused(mean, zero):
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        parallel = parallelize_model(copy.deepcopy(MODEL), mesh, zero=zero)
        with refused(ModelError, "mean-of-rank", "2 data ranks", "valid_tokens"):
            MEANS[mean](parallel, mesh)
        assert all(parameter.grad is None for parameter in parallel.module.parameters())

    run_ranks(2, body)


def test_what_is_divided_afterwards_or_by_all_ranks_is_not_judged():
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        parallel = parallelize_model(copy.deepcopy(MODEL), mesh)

        def logits() -> T:
            return parallel.module(input_ids=IDS, use_cache=False).logits

        cross_entropy(logits(), LABELS, mesh=mesh).backward()
        cross_entropy(logits(), LABELS, num_tokens=10).backward()
        flat = logits().flatten(0, 1)
        (F.cross_entropy(flat, LABELS.flatten()) / 2).backward()
        (cross_entropy(logits(), LABELS) / 2).backward()
        assert float(cross_entropy(logits(), LABELS)) > 0  # of a log
        F.cross_entropy(logits().flatten(0, 1), LABELS.flatten(), reduction="sum").div(
            valid_tokens(LABELS, mesh)
        ).backward()
        with torch.no_grad():
            cross_entropy(logits(), LABELS)  # of an evaluation
        sums = (logits().sum() * factor for factor in (1.0, 2.0))
        torch.autograd.backward(sums)  # an iterator, which is read once
        other = nn.Linear(67, 5).double()  # a model of nobody's mesh beside it
        F.cross_entropy(other(flat.detach()), LABELS.flatten() % 5).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 1}], ids=str)
def test_a_mean_where_one_rank_has_all_samples(axes):
    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(MODEL), build_mesh("cpu", **axes))
        logits = parallel.module(input_ids=IDS, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()

    run_ranks(2 if "tp" in axes else 1, body)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_loss_of_a_step_is_a_sum(axes):
    """Unless `count` says what it is divided by."""

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", **axes)
        options = {"loss": lambda output, labels: F.cross_entropy(output.logits.transpose(1, 2), labels)}
        options |= {"num_microbatches": 2} if "pp" in axes else {}
        parallel = parallelize_model(copy.deepcopy(MODEL), mesh, **options)
        with pytest.raises((ModelError, PipelineError), match="loss-no-sum"):
            parallel.step(input_ids=IDS, targets=LABELS)
        counted = parallelize_model(copy.deepcopy(MODEL), mesh, count=lambda labels: 1, **options)
        counted.step(input_ids=IDS, targets=LABELS)
        alone = parallelize_model(copy.deepcopy(MODEL), build_mesh("cpu", tp=2), loss=options["loss"])
        with pytest.raises((ModelError, PipelineError), match="loss-no-sum"):  # divided once more, by 60 or so
            alone.step(input_ids=IDS, targets=LABELS)
        nested = parallelize_model(copy.deepcopy(MODEL), mesh, **options)
        with pytest.raises((ModelError, PipelineError), match="no-count"):
            nested.step(input_ids=IDS, targets={"labels": LABELS})
        by_count = parallelize_model(copy.deepcopy(MODEL), mesh, count=lambda labels: labels.numel(), **options)
        with pytest.raises((ModelError, PipelineError), match="what `count` returns"):
            by_count.step(input_ids=IDS, targets=LABELS)

    run_ranks(2, body)


def test_a_model_whose_output_is_the_loss():
    """As nanoGPT's, which returns logits and loss."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: T, classes: T) -> tuple[T, T]:
            logits = self.block(x)
            return logits, F.cross_entropy(logits, classes)

    torch.manual_seed(0)
    model, x, classes = WithLoss(), torch.randn(4, 8), torch.tensor([0, 3, 5, 7])

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=2))
        _, loss = parallel.module(x, classes)
        with refused(ModelError, "mean-of-rank"):
            loss.backward()

    run_ranks(2, body)
