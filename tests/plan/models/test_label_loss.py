"""What a model computes from labels is seen by running its class, not read from a name."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.label_loss_probe import Form, LabelLoss, probed, probed_function
from tests.support.models import COMMON, GQA, tiny_model

transformers = pytest.importorskip("transformers")
IDS = torch.zeros(2, 3, dtype=torch.long)
CAUSAL = LabelLoss("labels", 1, of_logits=True, ignored=(-100,), divides=True, takes_shifted=True)
ALIGNED = LabelLoss("labels", 0, of_logits=True, ignored=(-100,))
TWO = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
TWO |= dict(encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=67, pad_token_id=0, eos_token_id=2)
TWO |= dict(bos_token_id=1, decoder_start_token_id=2, forced_eos_token_id=2, max_position_embeddings=32)


def of(cls: str, config: str, labels: torch.Tensor = IDS, **fields) -> LabelLoss:
    return label_loss(getattr(transformers, cls)(getattr(transformers, config)(**fields)), labels)


def of_llama(head: str, labels: torch.Tensor, **fields) -> LabelLoss:
    return of(f"LlamaFor{head}", "LlamaConfig", labels, **{**COMMON, **GQA, **fields})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_next_tokens_and_a_sum_that_a_count_divides(family):
    assert label_loss(tiny_model(family), IDS) == CAUSAL


def test_a_name_of_no_loss_does_not_say_that_labels_are_shifted():
    assert of("MarianMTModel", "MarianConfig", **TWO) == of("BartForCausalLM", "BartConfig", **TWO) == ALIGNED
    sizes = dict(vocab_size=67, d_model=16, n_layer=1, n_head=2, d_inner=24)
    assert of("XLNetLMHeadModel", "XLNetConfig", **sizes) == ALIGNED
    assert label_loss(tiny_model("bert"), IDS) == ALIGNED


def test_a_router_loss_is_told_apart_from_that_of_the_labels():
    assert label_loss(tiny_model("mixtral"), IDS) == CAUSAL
    routed = label_loss(tiny_model("mixtral", output_router_logits=True), IDS)
    assert routed.adds_router_loss and routed.shift == 1 and routed.divides


def test_the_same_class_computes_another_loss_from_labels_of_another_form():
    classes = of_llama("SequenceClassification", torch.zeros(2, dtype=torch.long), num_labels=3)
    assert (classes.mean_over, classes.shift, classes.of_logits) == ("labels", 0, True)
    several = of_llama("SequenceClassification", torch.zeros(2, 3), num_labels=3)
    number = of_llama("SequenceClassification", torch.zeros(2), num_labels=1)
    assert several == number == LabelLoss("samples")
    assert of_llama("TokenClassification", IDS, num_labels=3) == ALIGNED


class Doubled(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **more):
        output = super().forward(input_ids=input_ids, labels=labels, **more)
        if labels is not None:
            output.loss = 2 * output.loss
        return output


def of_words(logits, labels, vocab_size, **more):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_loss_of_the_user():
    model = tiny_model("llama")
    doubled = label_loss(Doubled(model.config), IDS)
    assert not doubled.of_logits and doubled.mean_over == "" and "cross entropy" in doubled.unknown
    model.loss_function = of_words
    assert label_loss(model, IDS) == ALIGNED
    assert label_loss(tiny_model("llama"), IDS) == CAUSAL


def test_models_that_are_not_of_transformers():
    kind = label_loss(nn.Linear(2, 2), IDS)
    assert (kind.shift, kind.of_logits, kind.mean_over) == (1, True, "") and "no config" in kind.unknown
    assert "dict" in label_loss(nn.Linear(2, 2), {}).unknown


def test_a_class_that_does_not_run_computes_what_its_function_does():
    function = tiny_model("gpt2").loss_function
    assert probed_function(function, transformers.GPT2Config(), Form(2, False)) == CAUSAL
    assert "does not run" in probed_function(nn.Linear(2, 2), transformers.GPT2Config(), Form(2, False)).unknown
    assert isinstance(probed(nn.Linear, transformers.GPT2Config(), Form(2, False)), str)


def test_nothing_is_left_of_the_tiny_model(caplog, capfd):
    model = tiny_model("qwen2")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert label_loss(model, IDS) == CAUSAL
            assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()
    assert not warned and not caplog.records and capfd.readouterr() == ("", "")
