"""`explain` and `lint` handle models without a head of logits, unusual attention, and huge meshes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import explain, lint
from parallelize.base.mesh import MOST_RANKS, MeshSpec
from parallelize.tools.analysis.cost.machine import load_machine
from tests.support.models import COMMON, FAMILIES


@pytest.mark.variants(every=2)
@pytest.mark.parametrize(
    "head", ["LlamaForSequenceClassification", "LlamaModel", "BertModel", "GPT2ForSequenceClassification"]
)
def test_models_without_a_head_of_logits_are_right(head):
    import transformers

    family = next(name for name in ("llama", "bert", "gpt2") if head.lower().startswith(name))
    config_name, _, sizes = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**COMMON, **sizes})
    findings = lint(lambda: getattr(transformers, head)(config), None, "tp=2")
    assert not [finding for finding in findings if finding.severity == "error"], [
        str(finding.problem) for finding in findings
    ]


class Odd(nn.Module):
    """Attention whose values are wider than its queries, with a learned bias; and a forward whose self has another
    name."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.bias = nn.Parameter(torch.zeros(8, 8))
        self.value = nn.Linear(16, 24)
        self.head = nn.Linear(24, 37)

    def forward(s, ids):  # noqa: N805
        x = s.embed(ids)[:, None]
        return s.head(F.scaled_dot_product_attention(x, x, s.value(x), attn_mask=s.bias)[:, 0])


def test_attention_that_no_fused_kernel_serves():
    assert explain(Odd, None, "dp=2", sequence=8).ranks[0].flops > 0


def test_links_of_huge_meshes_are_arithmetic():
    machine = load_machine("h100-sxm")
    ranks = MOST_RANKS // 8
    assert machine.placement(MeshSpec(dp=ranks, tp=8), "dp").nodes > 1
    assert machine.placement(MeshSpec(dp=ranks, tp=8), "tp").nodes == 1
