"""Plans of further families: a step on ranks equals the unsharded one, in every mode of the plan."""

from __future__ import annotations

import importlib

import pytest
import torch

from parallelize import MeshSpec, PlanError
from parallelize.plan.choose import shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.tools.derivation.proof import provable, prove
from parallelize.tools.verification.verify import verify
from tests.support.models import SHIPPED, shipped_source
from tests.support.refused import refused

QUICK = ("cohere-norms", "t5", "clip", "mamba2-one-group")
"""What other plans do not have: a norm with a weight for each head, two lists of layers, two towers, state-space mixers
with shared groups."""


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """RWKV looks for a compiler by starting it."""
    module = importlib.import_module("transformers.models.rwkv.modeling_rwkv")
    monkeypatch.setattr(module, "is_ninja_available", lambda: False)


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


def on_mesh(family, mesh, **options):
    torch.manual_seed(0)
    source = shipped_source(family)
    return verify(source, shipped_plan_of(source.config), mesh, full_size=True, **options)


STACKS = [
    "cohere",
    "cohere-norms",
    "cohere2",
    "olmo",
    "starcoder2",
    "stablelm",
    "glm",
    "persimmon",
    "phi",
    "nemotron",
    "arcee",
    "apertus",
    "gptj",
    "gpt_neo",
    "codegen",
    "gpt_bigcode",
    "bloom",
    "falcon",
    "falcon-grouped",
    "falcon-alibi",
    "mpt",
    "gemma",
    "lfm2",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "bamba",
    "recurrent_gemma",
    "rwkv",
    "roberta",
    "electra",
    "distilbert",
    "modernbert",
]
"""Families whose layers are one stack, whatever is before and after it."""


@pytest.mark.parametrize("family", ["falcon-alibi"])
def test_a_pipeline_of_stages(family):
    assert on_mesh(family, "pp=2,tp=2").ok


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("family", STACKS)
def test_every_stack_in_stages(family, mesh):
    result = on_mesh(family, mesh)
    assert result.ok, result.difference or result


RECURRENT = ["mamba", "mamba2", "falcon_mamba", "bamba", "recurrent_gemma", "rwkv", "lfm2"]
OWN_ATTENTION = ["gptj", "codegen", "gpt_neo", "bloom", "mpt", "falcon", "falcon-alibi"]


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("family", RECURRENT + OWN_ATTENTION)
def test_gathered_modules_over_cp(family, mesh):
    """Each rank runs recurrences, and attention that is written as matmuls or with biases, on the full sequence."""
    result = on_mesh(family, mesh)
    assert result.ok, result.difference or result


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mesh", "options"), [("cp=2,tp=2", {}), ("dp=2,tp=2", {"zero": 2, "recompute": "full"}), ("tp=8", {})]
)
def test_layers_that_share_keys_and_mix_copies_of_the_residual(mesh, options):
    result = on_mesh("gemma3n", mesh, **options)
    assert result.ok, result.difference or result


@pytest.mark.parametrize(
    ("family", "tp", "named"),
    [
        ("mpt-twelve-heads", 8, "12 over axis tp"),
        ("codegen", 8, "16 in 4 chunks"),
        ("falcon-grouped", 8, "4 over axis tp"),
        ("swin", 8, "4 over axis tp"),
        ("mamba2-many-groups", 8, "12 over axis tp"),
    ],
)
def test_heads_that_ranks_do_not_divide(family, tp, named):
    source = shipped_source(family)
    with torch.device("meta"):
        facts = describe(source.build("meta"))
    with refused(PlanError, "uneven-heads", named):
        resolve(shipped_plan_of(source.config), facts, MeshSpec(tp=tp), Options(sequence_parallel=False))


@pytest.mark.sweep
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", SHIPPED)
def test_every_plan_is_right(family, tp):
    proof = proof_of(family, tp)
    assert proof.ok, proof
