"""Derived plans of models with towers name the attention of their text, where that is proven on cp."""

from __future__ import annotations

import pytest

from parallelize.tools.derivation.auto import source_of_instance
from parallelize.tools.derivation.derive import derive_plan
from tests.support import images

KINDS = {"qwen3_vl": "causal", "gemma3": "gathered", "smolvlm": "causal", "voxtral": "causal"}


@pytest.mark.sweep
@pytest.mark.parametrize("family", KINDS)
def test_the_kind_that_is_proven(family):
    plan = derive_plan(source_of_instance(images.build(family).float())).plan
    part = "text_model" if family == "smolvlm" else "language_model"
    assert [(rule.pattern, rule.kind) for rule in plan.attention] == [
        (f"model.{part}.layers.*.self_attn", KINDS[family])
    ]
