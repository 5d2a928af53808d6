"""Every class of transformers that takes labels of tokens: what a step makes of labels is what the class computes, or
it is refused."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from parallelize.axes.pipeline.batch_reader import token_targets
from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.label_loss_probe import LabelLoss, _inputs_of
from parallelize.plan.models.miniature.tiny_models import tiny_copies

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.sweep, pytest.mark.on_cpus("tiny models of every class")]
IDS = torch.zeros(2, 3, dtype=torch.long)
OF_TOKENS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")
NOT_SHIFTED = (
    "Bart",
    "MBart",
    "PLBart",
    "Marian",
    "Pegasus",
    "Blenderbot",
    "BlenderbotSmall",
    "BigBirdPegasus",
    "MvpFor",
)
"""Families whose causal classes compare labels with the logits at their own positions."""


def classes() -> list[str]:
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    named = (getattr(module, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in OF_TOKENS)
    every = {
        cls for mapping in named for value in mapping.values() for cls in ([value] if isinstance(value, str) else value)
    }
    return sorted(every)


def subject(name: str):
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or "_backends" in vars(cls) or cls.config_class is None:
        pytest.skip("not installed, or without a config of its own")
    try:
        config = cls.config_class()
    except Exception as error:  # of a validator of huggingface_hub
        pytest.skip(f"its config has no defaults: {error}")
    model = next(tiny_copies(cls, config), None)
    if model is None:
        pytest.skip("no tiny model can be built")
    return model


@pytest.mark.variants(every=16)
@pytest.mark.parametrize("name", classes())
@torch.no_grad()
def test_labels_are_compared_as_the_class_compares_them(name):
    torch.manual_seed(5)
    model = subject(name)
    kind = label_loss(model, IDS)
    assert isinstance(kind, LabelLoss)
    if not kind.of_logits or kind.unknown:
        pytest.skip(f"refused, or as its function says: {kind.unknown}")
    inputs = next(iter(_inputs_of(model)))
    try:
        logits = model(**inputs).logits
    except Exception as error:
        pytest.skip(f"not with ids alone: {error}")
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    labels[0, :3] = -100
    expected = model(**inputs, labels=labels)
    targets = token_targets(model, None, labels, inputs.get("attention_mask"))
    loss = F.cross_entropy(expected.logits.float().flatten(0, -2), targets.flatten())
    torch.testing.assert_close(expected.loss.float(), loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", NOT_SHIFTED)
def test_families_that_do_not_shift(family):
    names = [name for name in classes() if name.startswith(family) and name.endswith("ForCausalLM")]
    for name in names:
        assert label_loss(subject(name), IDS).shift == 0
