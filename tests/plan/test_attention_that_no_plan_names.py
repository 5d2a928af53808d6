"""A plan without `attention:` over cp: why it has none, or the model's own modules to name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelize import PlanError
from parallelize.plan.choose import plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import attention_kinds
from tests.support.models import shipped_source

NOT_SERVED = {
    "clip": "vision_model reads images, no sequences",
    "t5": "its decoder attends to the tokens of the encoder, another sequence",
    "whisper": "its decoder attends to the tokens of the encoder, another sequence",
    "vit": "its inputs are images, no sequences",
}


NAMED = {"roberta": "roberta.encoder.layer.*.attention", "llava": "model.language_model.layers.*.self_attn"}


@pytest.mark.parametrize("name", [*NOT_SERVED, *NAMED])
def test_the_refusal_says_what_can_be_done(name):
    model = shipped_source(name).build("meta")
    with pytest.raises(PlanError) as error:
        attention_kinds(replace(plan_of(model, None), attention=()), describe(model))
    assert error.value.slugs == ("no-attention",)
    text = str(error.value)
    if name in NOT_SERVED:
        assert NOT_SERVED[name] in text and "a mesh without cp" in text
    else:
        assert f"attention: {{{NAMED[name]}: causal}}, or bidirectional" in text
