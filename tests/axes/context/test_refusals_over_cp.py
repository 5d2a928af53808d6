"""What context parallelism cannot compute is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import (
    HandshakeError,
    ModelError,
    ParallelizeError,
    PlanError,
    ShapeError,
    build_mesh,
    parallelize_model,
    parallelize_module,
)
from parallelize.plan.plan_file import parse_plan
from tests.axes.context.two_ranks import IDS, WithStockAttention, llama_head, over_cp, refused
from tests.axes.tensor.layers.test_ulysses_style import plan_of
from tests.support.context import family
from tests.support.threads import run_ranks


def test_heads_that_pool_one_row_are_refused():
    import transformers

    classifier = llama_head("LlamaForSequenceClassification", num_labels=3)
    refused("one-row", classifier, input_ids=IDS)
    refused("one-row", classifier, input_ids=IDS, return_dict=False)
    refused("labels-over-cp", classifier, input_ids=IDS, labels=torch.tensor([0, 1]))
    bert = transformers.BertForPreTraining(family("bert").config).double()
    refused("one-row", bert, input_ids=IDS)
    refused("one-row", family("llama"), input_ids=IDS, logits_to_keep=1)


def test_a_loss_that_is_no_sum_over_next_tokens_is_refused():
    tokens = llama_head("LlamaForTokenClassification", num_labels=3).eval()
    refused("labels-over-cp", tokens, input_ids=IDS, labels=IDS % 3)


TEXT = """
schema_version: 1
tensor_parallel: {q: replicate}
attention: {"q": causal}
positions: places
"""


@pytest.mark.parametrize("other", [nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, batch_first=True)])
def test_modules_that_attend_by_themselves_are_refused(other):
    def body(rank):
        with pytest.raises(ModelError, match="unplanned-attention"):
            over_cp(WithStockAttention(other), plan=parse_plan(TEXT.replace("q: replicate", "'{q,other}*': replicate")))

    run_ranks(2, body)


def test_reentrant_checkpointing_is_refused():
    model, embeds = family("llama"), torch.randn(2, 6, 48, dtype=torch.float64)

    def body(rank):
        over_ranks = over_cp(model)
        layer = over_ranks.model.layers[0]
        stock = layer.forward
        layer.forward = lambda x, **rest: checkpoint(lambda y: stock(y, **rest), x, use_reentrant=True)
        with pytest.raises(ModelError, match="reentrant"):
            over_ranks(inputs_embeds=embeds.clone().requires_grad_()).logits.sum().backward()

    run_ranks(2, body)


def test_ranks_with_different_settings_or_batches_are_refused():
    model = family("llama")

    def settings(rank):
        with pytest.raises(HandshakeError):
            over_cp(model, ulysses=1 + rank)

    def batches(rank):
        with pytest.raises(HandshakeError, match="over cp"):
            over_cp(model)(input_ids=IDS + rank)

    run_ranks(2, settings)
    run_ranks(2, batches)


def test_targets_without_a_row_for_each_token_are_refused():
    models = [family("llama") for _ in range(2)]  # not on threads, which share a generator

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", cp=2))
        for targets in (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64)):
            with pytest.raises(ParallelizeError, match="wrong-rows"):
                parallel.step(input_ids=IDS, targets=targets)

    run_ranks(2, body)


def test_the_style_ulysses_and_cp_are_not_mixed():
    def body(rank):
        with pytest.raises(PlanError, match="ulysses-over-cp"):
            parallelize_module(family("llama"), build_mesh("cpu", cp=2, tp=2), plan_of("llama"), sequence_parallel=True)

    run_ranks(4, body)


def test_attentions_and_dropout_that_is_not_installed_are_refused():
    refused("attentions-are-shards", family("llama"), input_ids=IDS, output_attentions=True)
    refused("dropout-not-installed", family("gpt2", resid_pdrop=0.5).train(), input_ids=IDS)

    def body(rank):
        over_cp(family("gpt2", resid_pdrop=0.5).eval())(input_ids=IDS)

    run_ranks(2, body)


def test_lengths_that_differ_after_the_first_forward_are_refused_on_every_rank():
    model = family("llama")

    def body(rank):
        parallel = over_cp(model)
        expected = parallel(input_ids=IDS).logits
        with pytest.raises(ShapeError, match=r"rank 1 *forward over cp, inputs \[2, 4\]") as error:
            parallel(input_ids=IDS[:, : 6 - 2 * rank])
        assert error.value.slugs == ("ranks-disagree",)
        assert torch.equal(parallel(input_ids=IDS).logits, expected)

    run_ranks(2, body)
