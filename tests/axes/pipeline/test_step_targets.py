"""Targets of a step: their position is that of the logits; labels are shifted as in the stock model; mistakes have
names."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, next_tokens, parallelize_model
from parallelize.base.errors import ParallelizeError
from parallelize.state.full_values import full_gradients
from tests.support.models import COMMON, GQA, tiny_batch, tiny_model
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


def bart(name: str, **more: Any) -> nn.Module:
    """A model of the BART kind, whose causal class does not shift labels."""
    import transformers

    sizes = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes |= dict(encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=67, dropout=0.0, max_position_embeddings=32)
    sizes |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)
    torch.manual_seed(0)
    return getattr(transformers, name)(transformers.BartConfig(**sizes, **more)).double()


def assert_step_is_stock(model: nn.Module, inputs: dict[str, Any], labels: Any, axes: dict[str, int]) -> None:
    """The loss and every gradient of a step on labels, against those of the stock model, whose loss is in float32."""
    stock = copy.deepcopy(model)
    expected = stock(**inputs, labels=labels).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}

    def body(rank: int) -> None:
        parallel = parallel_of(model, axes)
        rows = slice(2 * rank, 2 * rank + 2) if "dp" in axes and axes["dp"] > 1 else slice(None)
        value = parallel.step(**{name: tensor[rows] for name, tensor in inputs.items()}, labels=labels[rows])
        torch.testing.assert_close(value, expected.detach(), check_dtype=False, rtol=1e-6, atol=0)
        for name, gradient in full_gradients(parallel.module).items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-7)

    run_ranks(math.prod(axes.values()), body)


def four_rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids, _ = tiny_batch(batch=4, length=8)
    labels = ids.clone()
    labels[0, 5:] = -100
    return ids, labels


def test_labels_are_not_shifted_where_the_stock_model_does_not_shift_them():
    ids, labels = four_rows()
    assert_step_is_stock(bart("BartForCausalLM"), {"input_ids": ids}, labels, {"dp": 2})


def test_a_decoder_reads_what_the_stock_model_makes_from_labels():
    ids, labels = four_rows()
    assert_step_is_stock(bart("BartForConditionalGeneration"), {"input_ids": ids}, labels, {"tp": 2})
    assert_step_is_stock(bart("BartForConditionalGeneration"), {"input_ids": ids[:, :6]}, labels, {"dp": 2})


class Encoded(nn.Module):
    """A model of two of the user's own, which transformers has no function for."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.table = nn.Embedding(67, 67)

    def forward(self, input_ids, decoder_input_ids=None):
        return self.table(decoder_input_ids)


def test_a_decoder_whose_input_nothing_makes_is_refused():
    model, (ids, labels) = Encoded(), four_rows()

    def body(rank: int) -> str:
        parallel = parallel_of(model, {"dp": 2}, plan=None)
        rows = slice(2 * rank, 2 * rank + 2)
        parallel.step(ids[rows], decoder_input_ids=ids[rows], labels=labels[rows])
        return error_of(parallel.step, ids[rows], labels=labels[rows])

    assert all("no-decoder-ids" in text and "decoder_input_ids" in text for text in run_ranks(2, body))


def test_classes_of_samples_are_labels():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**COMMON, **GQA, num_labels=3)).double()
    ids, classes = four_rows()[0].clamp(min=3), torch.tensor([0, 2, -100, 1])
    for axes in ({"tp": 2}, {"dp": 2}, {"pp": 2}):
        assert_step_is_stock(model, {"input_ids": ids}, classes, axes)
