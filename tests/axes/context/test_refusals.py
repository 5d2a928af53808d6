"""Mistakes with context parallelism, each by its slug."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, ParallelizeError, ShapeError, build_mesh, context_parallel
from parallelize.plan.plan_file import parse_plan
from parallelize.state.records import applied
from tests.support.models import tiny_model
from tests.support.refused import WIDTH, refused, small_mesh
from tests.support.threads import run_ranks

IDS = torch.arange(3, 15).view(2, 6)
HIDDEN = torch.randn(2, 6, WIDTH)
PLAN = parse_plan(
    """
    schema_version: 1
    tensor_parallel: {attention.project: replicate}
    attention: {attention: causal}
    positions: none
    """
)


class Attention(nn.Module):
    """Attention with a given number of query and key heads and a given dropout."""

    def __init__(self, heads: int = 4, key_heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.heads, self.key_heads, self.rate = heads, key_heads, dropout
        self.project = nn.Linear(WIDTH, 2 * (heads + 2 * key_heads))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.project(hidden).unflatten(-1, (-1, 2)).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.key_heads, self.key_heads], 1)
        rate = self.rate if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, None, rate, True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.attention = Attention(**options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden)


def check_forward(
    model: nn.Module, plan: Any, kind: type[ParallelizeError], slug: str, *named: str, **inputs: Any
) -> None:
    """Both ranks of cp refuse a forward of the model."""

    def body(rank: int) -> None:
        applied = context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2), plan)
        with refused(kind, slug, *named):
            applied(**inputs)

    run_ranks(2, body)


def test_packed_lengths_are_not_supported_over_cp():
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32)
    named = ("model.layers.0.self_attn", "cu_seq_lens_q")
    check_forward(
        tiny_model("llama"), None, ModelError, "attention-argument", *named, input_ids=IDS, cu_seq_lens_q=lengths
    )


def test_a_window_without_a_causal_mask():
    model = tiny_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    named = ("model.layers.0.self_attn", "a window of 5 tokens")
    check_forward(model, None, ModelError, "window-without-causal", *named, input_ids=IDS)


def test_dropout_of_attention_weights_that_is_turned_on_after_the_first_forward():
    def body(rank: int) -> None:
        model = context_parallel(Model(dropout=0.1).eval(), build_mesh("cpu", cp=2), PLAN)
        model(HIDDEN)
        model.train()
        with refused(ModelError, "attention-dropout", "attention drops", "p = 0.1"):
            model(HIDDEN)

    run_ranks(2, body)


def test_query_heads_that_key_heads_cannot_share():
    named = ("6 query heads", "4 key heads")
    check_forward(Model(heads=6), PLAN, ShapeError, "uneven-groups", *named, hidden=HIDDEN)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_table_that_depends_on_the_length(kind):
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    with small_mesh(cp=2) as mesh, refused(ModelError, "length-dependent-rotary", kind, "off cp"):
        context_parallel(model, mesh)
    assert applied(model).context is None and "forward" not in vars(model)
