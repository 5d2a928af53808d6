"""Plans of further families: a step on ranks equals the unsharded one, in every mode of the plan."""

from __future__ import annotations

import pytest
import torch

from parallelize.derivation.example_inputs import inputs_of
from parallelize.derivation.proof import provable, prove
from parallelize.plan.choose import shipped_plan_of
from tests.support.models import SHIPPED, shipped_source

QUICK = ("cohere-norms", "t5", "clip")
"""What other plans do not have: a norm with a weight for each head, two lists of layers, two towers."""


def proof_of(family, tp):
    torch.manual_seed(0)
    source = shipped_source(family)
    model = source.build("cpu")
    plan = shipped_plan_of(source.config)
    assert plan is not None
    return prove(provable(source, model, inputs_of(source, model)), plan, tp)


@pytest.mark.parametrize("family", QUICK)
def test_a_plan_is_right(family):
    proof = proof_of(family, 2)
    assert proof.ok, proof


@pytest.mark.sweep
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", SHIPPED)
def test_every_plan_is_right(family, tp):
    proof = proof_of(family, tp)
    assert proof.ok, proof
