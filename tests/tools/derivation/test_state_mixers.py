"""Mixers that carry a state along the sequence: packed projections with parts of parts, convolutions that their parent
reads, low rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import derive_plan
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import read_model
from parallelize.tools.derivation.proof import provable, prove
from parallelize.tools.derivation.small_model import small_model
from tests.tools.derivation import own_models as models

STYLES = {
    "attn": "scan",
    "attn.in_proj": "colwise(heads*6 + heads_4*5 + heads_4*5 + heads*1)",
    "attn.conv": "shard(0, unit=heads*6 + heads_4*5 + heads_4*5)",
    "attn.{gate_a,norm}": "replicate(gradient=partial)",
    "attn.gate_b": "colwise(heads)",
    "attn.out_proj": "rowwise(heads)",
    "attn.decay": "shard(0, unit=heads*1)",
}
PACKED = "packed: heads*6 + heads_4*5 + heads_4*5"


def test_a_mixer_whose_code_reads_the_shards_of_its_convolution():
    derived = derive_plan(models.state_mixers(), models.ids(), verified=False)
    rules = {rule.pattern.removeprefix("blocks.*."): str(rule.style) for rule in derived.plan.rules}
    assert {name: rules[name] for name in STYLES} == STYLES
    assert f"{{groups: heads_4, heads: heads, inner: heads, {PACKED}}}" in derived.text


@pytest.mark.sweep
def test_its_plan_is_proven_with_sequence_parallelism():
    derived = derive_plan(models.state_mixers(), models.ids())
    assert derived.whole == {} and derived.share > 0.97 and "sequence parallel" in str(derived.proof)


class DroppingMixer(models.StateMixer):
    def forward(self, hidden):
        return super().forward(F.dropout(hidden, 0.0, self.training))


@pytest.mark.sweep
def test_a_mixer_that_draws_in_training_is_not_run_as_in_evaluation():
    """The style of mixers would leave out its dropout, which the proof does not see."""
    model = models.state_mixers()
    for block in model.blocks:
        block.attn.__class__ = DroppingMixer
    derived = derive_plan(model, models.ids())
    assert "scan" not in derived.text and "mlp.up: colwise" in derived.text


@pytest.mark.sweep
@pytest.mark.parametrize("groups", [1, 2])
def test_fewer_groups_than_ranks(groups):
    """Several ranks store the same B and C, and the norm is over groups that several ranks have together."""
    source = read_model("zamba2")
    derived = derive_plan(source)
    config = copy.deepcopy(derived.model.config)
    config.mamba_ngroups, config.n_mamba_heads = groups, 8
    config.mamba_headdim = config.mamba_expand * config.hidden_size // 8
    small = source.with_config(config)
    model = small.build("cpu").train()
    assert prove(provable(small, model, inputs_of(small, model)), derived.plan, 4).ok


@pytest.mark.sweep
@pytest.mark.parametrize(("model_type", "share"), [("kimi_linear", 0.95), ("olmo_hybrid", 0.99)])
def test_types_with_linear_attention(model_type, share):
    derived = derive_plan(model_type)
    assert derived.share > share and "sequence + loss parallel" in str(derived.proof)
    with torch.random.fork_rng(devices=[]):
        small, model = small_model(read_model(model_type), 4)
        assert prove(provable(small, model, inputs_of(small, model)), derived.plan, 4).ok
