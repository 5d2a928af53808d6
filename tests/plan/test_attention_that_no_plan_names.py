"""A plan without `attention:` over cp: why it has none, or the model's own modules to name."""

from __future__ import annotations

import pytest

from parallelize import PlanError
from parallelize.plan.choose import plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import attention_kinds
from tests.support.models import shipped_source

NOT_SERVED = {
    "llava": (
        "LlavaForConditionalGeneration over cp is not served: its forward puts what model.vision_tower returns in the "
        "places of images"
    ),
    "qwen2_vl": "puts what model.visual returns in the places of images among all tokens",
    "clip": "vision_model reads images, no sequences",
    "t5": "its decoder attends to the tokens of the encoder, another sequence",
    "whisper": "its decoder attends to the tokens of the encoder, another sequence",
    "vit": "its inputs are images, no sequences",
}


@pytest.mark.parametrize("name", [*NOT_SERVED, "roberta"])
def test_the_refusal_says_what_can_be_done(name):
    model = shipped_source(name).build("meta")
    with pytest.raises(PlanError) as error:
        attention_kinds(plan_of(model, None), describe(model))
    assert error.value.slugs == ("no-attention",)
    text = str(error.value)
    if name in NOT_SERVED:
        assert NOT_SERVED[name] in text and "a mesh without cp" in text
    else:
        assert "attention: {roberta.encoder.layer.*.attention: causal}, or bidirectional" in text
