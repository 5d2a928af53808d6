"""Transformers and a U-Net of `diffusers` get proven plans, in which nearly all of the layers' parameters are
sharded."""

from __future__ import annotations

import pytest

from parallelize import MeshSpec, derive_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve
from parallelize.tools.derivation.gathered_linears import layer_share
from tests.support.diffusion_models import FAMILIES

SHARES = {"unet": 0.88}
"""Of the layers' parameters; of transformers 0.98. The residual stream of a U-Net is concatenated and normalized in
full."""
RULES = {
    "flux": {
        "transformer_blocks.*.norm1.linear": "rowwise",  # of a time's vector, which the embedder leaves sharded
        "transformer_blocks.*.attn.{to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj}": "colwise(heads)",
        "transformer_blocks.*.attn.to_add_out": "rowwise(heads)",
        "single_transformer_blocks.*.attn.to_{q,k,v}": "colwise(heads)",
        "single_transformer_blocks.*.proj_out": "rowwise(heads*attention_head_dim + rest)",
    },
    "sd3": {"transformer_blocks.*.attn2.to_{q,k,v}": "colwise(heads)"},
    "wan": {
        "blocks.*.attn1.norm_{q,k}": "rms_norm(heads)",
        "blocks.*.attn2.to_{q,k,v}": "colwise(heads)",
        "blocks.*.attn2.to_out.0": "rowwise(heads)",
    },
    "pixart": {
        "transformer_blocks.*.attn2.to_{q,k,v}": "colwise(heads)",
        "transformer_blocks.*.ff.net.2": "rowwise",
    },
    "cogvideox": {"transformer_blocks.*.attn1.to_{q,k,v}": "colwise(heads)"},
    "hunyuan_video": {"single_transformer_blocks.*.proj_out": "rowwise(heads*attention_head_dim + rest)"},
    "dit": {"transformer_blocks.*.norm1.linear": "colwise(output=full)"},
    "unet": {
        "down_blocks.*.resnets.*.conv1": "colwise(norm_num_groups)",
        "down_blocks.*.attentions.*.transformer_blocks.*.ff.net.*.proj": "colwise(chunks=2)",
    },
}
QUICK = ("flux", "wan", "dit")


def _styles_of(derived):
    """The style of each module."""
    resolved = resolve(derived.plan, describe(derived.model), MeshSpec(tp=2))
    return {name: str(row.rule.style) for name, row in resolved.modules.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.sweep) for name in FAMILIES]
)
def test_a_proven_plan(name):
    build, inputs = FAMILIES[name]
    derived = derive_plan(build(), inputs())
    assert derived.proof.ok and derived.proof.error < 1e-12
    styles = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    sharded = {name: style for name, style in _styles_of(derived).items() if name}
    assert layer_share(derived.model, sharded) > SHARES.get(name, 0.98)
    for pattern, style in RULES[name].items():
        assert styles.get(pattern) == style, derived.text
