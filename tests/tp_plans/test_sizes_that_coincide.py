"""Sizes that coincide in real models: heads and their width, key/value heads, experts; hidden and inner width,
vocabulary.

Nothing may tell one from the other by its number.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers

from parallelize import MeshSpec
from parallelize.plan.choose import shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.miniature.rates import without_dropout
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.transformers_models import maker_of
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.tools.derivation.proof import provable, prove
from tests.support.models import COMMON, FAMILIES, MIXTURES, SHIPPED

_EIGHT = """num_attention_heads num_key_value_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads
linear_num_key_heads linear_num_value_heads num_kv_heads kv_n_heads num_global_key_value_heads index_n_heads
head_dim d_kv kv_channels qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim qk_rope_head_dim
global_head_dim ssm_state_size state_size index_head_dim num_experts num_local_experts n_routed_experts moe_num_experts"""  # noqa: E501
_SIXTY_FOUR = """hidden_size d_model n_embd dim vocab_size decoder_vocab_size intermediate_size moe_intermediate_size
intermediate_size_mlp shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size ffn_dim
encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_ff n_inner hidden_dim lru_width word_embed_proj_dim embedding_size projection_dim"""  # noqa: E501
EQUAL = dict.fromkeys(_EIGHT.split(), 8) | dict.fromkeys(_SIXTY_FOUR.split(), 64)

OTHER_RATIOS = {"mamba2", "mamba2-one-group", "mamba2-many-groups", "bamba", "granitemoehybrid", "nemotron_h", "siglip"}
"""Families whose config demands other ratios between these sizes."""
TEXTS = {name: family for name, family in {**FAMILIES, **MIXTURES, **SHIPPED}.items() if name not in OTHER_RATIOS}


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """RWKV looks for a compiler by starting it."""
    module = importlib.import_module("transformers.models.rwkv.modeling_rwkv")
    monkeypatch.setattr(module, "is_ninja_available", lambda: False)


def coinciding(sizes: Any) -> Any:
    """The sizes of a config, those of a kind all equal, but for lists, which have one for each stage."""
    if not isinstance(sizes, dict):
        return sizes
    return {
        name: coinciding(value) if isinstance(value, dict) else _equal(name, value) for name, value in sizes.items()
    }


def _equal(name: str, value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else EQUAL.get(name, value)


def source_with_equal_sizes(family: str) -> ModelSource:
    config_name, class_name, sizes = TEXTS[family]
    config = getattr(transformers, config_name)(**coinciding({**COMMON, **sizes}))
    config.architectures = [class_name]
    without_dropout(config)
    return ModelSource(family, maker_of(config, family), config)


@pytest.mark.parametrize("family", ["gpt_oss", "cohere-norms", "qwen3_moe", "t5"])
def test_a_plan_resolves(family):
    source = source_with_equal_sizes(family)
    plan, facts = shipped_plan_of(source.config), describe(source.build("meta"))
    assert plan is not None
    for tp in (2, 4, 8):
        resolve(plan, facts, MeshSpec(tp=tp), Options(sequence_parallel=bool(plan.regions)))


@pytest.mark.sweep
@pytest.mark.parametrize("family", TEXTS)
def test_every_plan_is_right(family):
    torch.manual_seed(0)
    source = source_with_equal_sizes(family)
    model = source.build("cpu")
    proof = prove(provable(source, model, inputs_of(source, model)), shipped_plan_of(source.config), 2)
    assert proof.ok, proof
