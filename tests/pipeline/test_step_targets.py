"""Targets of a step: their position is that of the logits; labels are shifted as in the stock model; mistakes have names."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, next_tokens, parallelize_model
from parallelize.errors import ParallelizeError
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

MESHES = [{"pp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}, {"dp": 1}]


def parallel_of(model: nn.Module, axes: dict[str, int], **options: Any) -> Any:
    if "pp" in axes:
        options["num_microbatches"] = 2
    return parallelize_model(copy.deepcopy(model), build_mesh("cpu", **axes), **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """ids, and labels as a Hugging Face collator makes them: the ids, -100 at padding."""
    ids, _ = tiny_batch(length=8)
    labels = ids.clone()
    labels[0, 5:] = -100
    return ids, labels


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ParallelizeError) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_labels_have_the_meaning_of_the_stock_model(axes):
    model, (ids, labels) = tiny_model("llama", torch.float64), batch()
    stock = copy.deepcopy(model)
    expected = stock(input_ids=ids, labels=labels).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}

    def body(rank: int) -> None:
        parallel = parallel_of(model, axes)
        evaluated = parallel.evaluate(input_ids=ids, labels=labels)
        loss = parallel.step(input_ids=ids, labels=labels)
        torch.testing.assert_close(evaluated, expected.detach(), check_dtype=False)
        torch.testing.assert_close(loss, expected.detach(), check_dtype=False)
        if "tp" not in axes:
            for name, parameter in parallel.module.named_parameters():
                torch.testing.assert_close(parameter.grad, gradients[name])

    run_ranks(math.prod(axes.values()), body)


def test_labels_of_a_masked_model_are_not_shifted():
    ids, labels = tiny_batch()
    model = tiny_model("bert", torch.float64)
    expected = model(input_ids=ids, labels=labels).loss.detach()

    def body(rank: int) -> None:
        loss = parallel_of(model, {"tp": 2}).step(input_ids=ids, labels=labels)
        torch.testing.assert_close(loss, expected)

    run_ranks(2, body)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_mistakes_with_targets_are_named_on_every_rank(axes, call):
    model, (ids, labels) = tiny_model("llama", torch.float64), batch()

    def body(rank: int) -> list[str]:
        parallel = parallel_of(model, axes)
        run = getattr(parallel, call)
        texts = [
            error_of(run, input_ids=ids, targets=labels),
            error_of(run, input_ids=ids),
            error_of(run, ids, labels),
            error_of(run, input_ids=ids, targets=next_tokens(labels), labels=labels),
            error_of(run, input_ids=ids, labels=labels[0]),
        ]
        run(input_ids=ids, targets=next_tokens(labels))
        return texts

    slugs = ["unshifted-targets", "no-targets", "no-targets", "labels-and-targets", "unclear-labels"]
    for texts in run_ranks(math.prod(axes.values()), body):
        assert [text.split(":")[0] for text in texts] == slugs


def test_one_rank_without_targets_is_named_on_all():
    model, (ids, labels) = tiny_model("llama", torch.float64), batch()

    def body(rank: int) -> str:
        parallel = parallel_of(model, {"dp": 2})
        return error_of(parallel.step, input_ids=ids, **({"labels": labels} if rank else {}))

    first, second = run_ranks(2, body)
    assert "no-targets" in first and "ranks-diverged" in second and "no-targets" in second


def test_targets_that_no_mistake_explains_are_accepted():
    model, ids = tiny_model("llama", torch.float64), tiny_batch(length=8)[0]
    one_token = torch.full_like(ids, 3)

    def body(rank: int) -> None:
        parallel_of(model, {"dp": 1}).step(input_ids=one_token, targets=one_token)
        parallel_of(model, {"dp": 1}, check_replicated=False).step(input_ids=ids, targets=ids)
        copies = parallel_of(model, {"dp": 1})
        copies.step(input_ids=ids, targets=next_tokens(ids))
        copies.step(input_ids=ids, targets=ids)  # compared in the first step alone

    run_ranks(1, body)


def test_a_loss_of_the_user_reads_what_it_wants():
    model, (ids, labels) = tiny_model("llama", torch.float64), batch()
    expected = model(input_ids=ids, labels=labels).loss.detach()

    def body(rank: int) -> None:
        of_model = parallel_of(model, {"dp": 1}, loss=lambda output, _: output.loss)
        torch.testing.assert_close(of_model.step(input_ids=ids, labels=labels), expected)
        of_ids = parallel_of(model, {"dp": 1}, loss=lambda output, targets: output.logits[targets != 0].sum())
        of_ids.step(input_ids=ids, targets=ids)

    run_ranks(1, body)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_step_without_gradients_is_refused(axes):
    model, (ids, labels) = tiny_model("llama", torch.float64), batch()

    def body(rank: int) -> None:
        parallel = parallel_of(model, axes)
        for off in (torch.no_grad, torch.inference_mode):
            with off(), pytest.raises(ModelError, match="gradients-off"):
                parallel.step(input_ids=ids, labels=labels)
        parallel.step(input_ids=ids, labels=labels)

    run_ranks(math.prod(axes.values()), body)
