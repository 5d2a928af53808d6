"""Plans that are derived: of each model what is expected, and proven. The models: own_models.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import derive_plan, parallelize_module, verify
from parallelize.base.errors import ModelError
from tests.support.refused import refused, small_mesh
from tests.tools.derivation import own_models as models

TRANSFORMER = """\
schema_version: 1
classes: {name}
sizes:
  heads: 4
{layers}tensor_parallel:
{rules}  "**": replicate
"""
ATTENTION = """\
    {name}: multihead(heads)
    {name}.out_proj: rowwise(heads)
"""
LINEARS = """\
    linear1: colwise
    linear2: rowwise
"""
PLANS = {
    "TinyGpt": """\
schema_version: 1
classes: TinyGpt
sizes:
  heads: 4
sequence_parallel: {layers: transformer.h, leave: transformer.ln_f}
tensor_parallel:
  transformer.wte: embedding
  transformer.h.*:
    norm{1,2}: sequence
    attn: gather
    attn.c_attn: colwise(heads + heads + heads)
    attn.c_proj: rowwise(heads)
    mlp: gather
    mlp.up: colwise
    mlp.down: rowwise
  transformer.ln_f: sequence
  lm_head: colwise(output=vocabulary)
  "**": replicate
local:
  transformer.h.*.attn: {n_embd: heads, n_head: heads}
""",
    "UNet": """\
schema_version: 1
classes: UNet
sizes:
  heads: 4
tensor_parallel:
  middle.to_{q,k,v}: colwise(heads)
  middle.to_out: rowwise(heads)
  # whole: down: a convolution in up
  "**": replicate
local:
  middle: {heads: heads}
""",
    "Mixer": """\
schema_version: 1
classes: Mixer
tensor_parallel:
  tokens.*:
    up: colwise
    down: rowwise
  channels.*:
    up: colwise
    down: rowwise
  # whole: enter: a norm over it in norms.*
  # whole: head: an output of the model
  "**": replicate
""",
    "TransformerEncoder": TRANSFORMER.format(
        name="TransformerEncoder",
        layers="pipeline: {layers: layers}\n",
        rules="  layers.*:\n" + ATTENTION.format(name="self_attn") + LINEARS,
    ),
    "TransformerDecoder": TRANSFORMER.format(
        name="TransformerDecoder",
        layers="pipeline: {layers: layers}\n",
        rules="  layers.*:\n"
        + "".join(ATTENTION.format(name=f"{word}_attn") for word in ("self", "multihead"))
        + LINEARS,
    ),
}
"""Files of derived plans, without what they say of the proof."""

MADE = {
    "TinyGpt": (models.TinyGpt, models.ids),
    "UNet": (models.UNet, models.image),
    "Mixer": (models.Mixer, models.patches),
    "TransformerEncoder": (models.encoder, models.tokens),
    "TransformerDecoder": (models.decoder, models.tokens_and_memory),
}
SHARES = {"TinyGpt": 0.952, "UNet": 0.697, "Mixer": 0.899, "TransformerEncoder": 0.979, "TransformerDecoder": 0.979}


def file_of(derived):
    return "".join(line for line in derived.text.splitlines(keepends=True) if not line.startswith("#"))


def derived_from(make, inputs):
    derived = derive_plan(make(), inputs())
    assert derived.proof.ok and str(derived.proof) in derived.text
    return derived


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("name", PLANS)
def test_the_file_of_a_plan(name):
    derived = derived_from(*MADE[name])
    assert file_of(derived) == PLANS[name]
    assert derived.share == pytest.approx(SHARES[name], abs=1e-3)


def rules_of(derived):
    return {rule.pattern: str(rule.style) for rule in derived.plan.rules}


@pytest.mark.sweep
def test_complex_rotary_factors_and_key_value_heads_that_are_repeated():
    derived = derived_from(models.ComplexRotary, models.ids)
    rules = rules_of(derived)
    assert rules["layers.*.attention.wq"] == "colwise(heads)" and rules["layers.*.attention.wo"] == "rowwise(heads)"
    assert rules["layers.*.attention.{wk,wv}"] == "colwise(heads_4)" and "**" not in rules
    assert "{n_heads: heads, n_kv_heads: heads_4, n_rep: heads/heads_4}" in derived.text
    assert derived.share > 0.99 and derived.whole == {} and "sequence parallel" in str(derived.proof)


def test_query_key_and_value_of_a_group_together():
    """The groups are the units of the packed weight, and the number of heads is divided with them."""
    derived = derived_from(models.grouped_qkv, models.ids)
    rules = rules_of(derived)
    assert rules["blocks.*.attn.attn"] == "colwise(heads)" and rules["blocks.*.attn.proj"] == "rowwise(heads_12)"
    assert "sizes:\n  heads: 4\n  heads_12: 12\n" in derived.text
    assert "blocks.*.attn: {groups: heads, heads: heads}" in derived.text and derived.share > 0.98


@pytest.mark.sweep
def test_a_learned_activation_between_sharded_linears():
    """What it multiplies by is made of a parameter and a buffer, so that each rank has a part of the parameter's
    gradient."""
    rules = rules_of(derived_from(models.learned_activation, models.ids))
    assert rules["blocks.*.mlp.act"] == "replicate(gradient=partial)" and rules["blocks.*.mlp.down"] == "rowwise"


def test_a_vision_transformer_with_a_class_token():
    derived = derived_from(models.Vision, models.image)
    rules = rules_of(derived)
    assert rules["blocks.*.attn.qkv"] == "colwise(heads + heads + heads)" and rules["blocks.*.mlp.down"] == "rowwise"
    assert derived.whole == {"head": "an output of the model", "patches": "a norm over it in blocks.0.norm1"}
    assert derived.plan.regions and derived.share == pytest.approx(0.870, abs=1e-3)


def test_queries_and_keys_that_are_normalized():
    """The width of a head is no number of query heads for each key/value head, though a norm is expanded over it."""
    derived = derived_from(models.CosineVision, models.patches)
    assert (
        rules_of(derived)["blocks.*.attn.qkv"] == "colwise(heads + heads + heads)"
        and "sizes:\n  heads: 4\n" in derived.text
    )


@pytest.mark.sweep
def test_norms_that_a_condition_modulates():
    """The condition is sharded where a linear makes it, and each block sums over its shards."""
    derived = derived_from(models.Diffusion, models.noisy_tokens)
    rules = rules_of(derived)
    assert rules["time.down"] == "colwise" and rules["blocks.*.modulation.1"] == "rowwise"
    assert rules["blocks.*.attn.qkv"] == "colwise(heads + heads + heads)"
    assert set(derived.whole) == {"enter", "time.up", "leave"} and derived.share == pytest.approx(0.934, abs=1e-3)


def test_a_recurrent_model_has_nothing_to_shard():
    model = nn.Sequential(models.LstmModel().lstm, Last(), nn.Linear(24, 5))
    with refused(
        ModelError, "nothing-to-shard", "no linear of Sequential can be sharded", "2", "an output of the model"
    ):
        derive_plan(model, {"input": torch.randn(2, 7, 24)})


class Last(nn.Module):
    def forward(self, output: tuple) -> torch.Tensor:
        return output[0][:, -1]


@pytest.mark.sweep
def test_positional_inputs():
    derived = derive_plan(models.TinyGpt(), tuple(models.ids().values()))
    assert file_of(derived) == PLANS["TinyGpt"]


def test_inputs_have_any_floating_dtype():
    """The model that runs is a copy in float32."""
    for dtype in (torch.bfloat16, torch.float64):
        inputs = {name: value.to(dtype) for name, value in models.patches().items()}
        derived = derive_plan(models.Mixer().to(dtype), inputs, verified=False)
        assert file_of(derived) == PLANS["Mixer"]


def test_a_plan_that_is_not_proven_says_so():
    derived = derive_plan(models.Mixer(), models.patches(), verified=False)
    assert derived.proof is None and "# not proven (--no-verify)\n" in derived.text
    assert file_of(derived) == PLANS["Mixer"]


def test_the_model_is_left_alone():
    model = models.TinyGpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    derive_plan(model.eval(), models.ids())
    assert not model.training and all((value == before[name]).all() for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_plan_is_applied():
    derived = derive_plan(models.Mixer(), models.patches(), verified=False)
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(models.Mixer(), mesh, derived.plan)
        assert model.tokens[0].up.weight.to_local().shape == (13, 14)


@pytest.mark.sweep
def test_an_encoder_and_a_decoder_of_torch():
    model = nn.Transformer(24, 4, 2, 2, 40, dropout=0.0, batch_first=True)
    model.encoder.enable_nested_tensor = False
    derived = derive_plan(model, {"src": torch.randn(2, 7, 24), "tgt": torch.randn(2, 5, 24)})
    rules = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    assert rules["decoder.layers.*.multihead_attn"] == "multihead(heads)" and derived.share > 0.9
    assert derived.proof.ok and derived.whole == {}


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
def test_the_plan_holds_on_other_meshes(mesh):
    derived = derive_plan(models.TinyGpt(), models.ids())
    assert verify(models.TinyGpt(), derived.plan, mesh).ok


# -- model types of transformers ---------------------------------------------------------------------------------------

LLAMA = """\
schema_version: 1
model_type: {model_type}
base: model
sizes:
  heads: num_attention_heads
  kv_heads: {{from: num_key_value_heads, below_tp: replicate}}
sequence_parallel: {{layers: model.layers, leave: model.norm}}
tensor_parallel:
  model.embed_tokens: embedding
  model.layers.*:
    self_attn: gather
{attention}{mlp}    input_layernorm: sequence
    post_attention_layernorm: sequence
  model.norm: sequence
  lm_head: colwise(output=vocabulary)
"""
SEPARATE = """\
    self_attn.q_proj: colwise(heads)
    self_attn.{k,v}_proj: colwise(kv_heads)
    self_attn.o_proj: rowwise(heads)
"""
QK_NORMS = "    self_attn.{q,k}_norm: replicate(gradient=partial)\n"
GATED = """\
    mlp: gather
    mlp.{gate,up}_proj: colwise
    mlp.down_proj: rowwise
"""
PACKED = """\
    self_attn.o_proj: rowwise(heads)
    self_attn.qkv_proj: colwise(heads + kv_heads + kv_heads)
"""
PACKED_GATED = """\
    mlp: gather
    mlp.gate_up_proj: colwise(chunks=2)
    mlp.down_proj: rowwise
"""
EXPERTS = """\
    mlp.experts: experts
    mlp.gate: sequence
"""
TYPES = {
    "llama": LLAMA.format(model_type="llama", attention=SEPARATE, mlp=GATED),
    "qwen3": LLAMA.format(model_type="qwen3", attention=SEPARATE + QK_NORMS, mlp=GATED),
    "qwen3_moe": LLAMA.format(model_type="qwen3_moe", attention=SEPARATE + QK_NORMS, mlp=EXPERTS),
    "phi3": LLAMA.format(model_type="phi3", attention=PACKED, mlp=PACKED_GATED)
    + "local:\n  model.layers.*.self_attn: {config.num_attention_heads: heads, num_key_value_heads: kv_heads}\n",
    "gpt2": """\
schema_version: 1
model_type: gpt2
base: transformer
sizes:
  heads: n_head
sequence_parallel: {layers: transformer.h, leave: transformer.ln_f}
tensor_parallel:
  transformer.wte: embedding
  transformer.h.*:
    ln_{1,2}: sequence
    attn: gather
    attn.c_attn: colwise(heads + heads + heads)
    attn.c_proj: rowwise(heads)
    mlp: gather
    mlp.c_fc: colwise
    mlp.c_proj: rowwise
  transformer.ln_f: sequence
  lm_head: colwise(output=vocabulary)
  "**": replicate
local:
  transformer.h.*.attn: {split_size: heads}
""",
    "bert": """\
schema_version: 1
model_type: bert
base: bert
sizes:
  heads: num_attention_heads
sequence_parallel: {layers: bert.encoder.layer}
tensor_parallel:
  bert.embeddings.word_embeddings: embedding
  bert.encoder.layer.*:
    attention.self: gather
    attention.self.{query,key,value}: colwise(heads)
    attention.output.dense: rowwise(heads)
    attention.output.LayerNorm: sequence
    intermediate: gather
    intermediate.dense: colwise
    output.dense: rowwise
    output.LayerNorm: sequence
  cls.predictions.decoder: colwise(output=vocabulary)
  # whole: cls.predictions.transform.dense: a norm over it in bert.embeddings.LayerNorm
  "**": replicate
local:
  bert.encoder.layer.*.attention.self: {num_attention_heads: heads}
""",
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.sweep if name != "phi3" else ()) for name in TYPES]
)
def test_the_file_of_a_model_type(model_type):
    derived = derive_plan(model_type)
    assert derived.proof.ok and file_of(derived) == TYPES[model_type]
    assert "sequence + loss parallel" in str(derived.proof)


@pytest.mark.sweep
def test_an_encoder_and_a_decoder():
    derived = derive_plan("t5")
    rules = rules_of(derived)
    for side in ("encoder", "decoder"):
        block = f"{side}.block.*.layer.*.SelfAttention"
        assert (rules[f"{block}.{{q,k,v}}"], rules[f"{block}.o"]) == ("colwise(heads)", "rowwise(heads)")
        assert rules[f"{block}.relative_attention_bias.weight"] == "shard(1, unit=heads*1)"
    cross = "decoder.block.*.layer.*.EncDecAttention"  # keys and values come from the encoder, whose output is full
    assert rules[f"{cross}.{{k,v}}"] == "colwise(heads, input=full)" and rules[f"{cross}.o"] == "rowwise(heads)"
    regions = [(region.layers, region.leave) for region in derived.plan.regions]
    assert regions == [(f"{side}.block", f"{side}.final_layer_norm") for side in ("encoder", "decoder")]
    sizes = [(p.ndim, p.numel()) for p in derived.model.parameters()]
    norms = sum(size for ndim, size in sizes if ndim == 1) / sum(size for _, size in sizes)
    assert derived.proof.ok and derived.whole == {} and derived.share == pytest.approx(1 - norms)
