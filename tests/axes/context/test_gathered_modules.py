"""Modules that mix tokens otherwise than by attention, over `cp`: their full sequence is gathered, and the numbers are
the unsharded model's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, PlanError, build_mesh, context_parallel, parallelize_module
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.plan.plan_file import parse_plan
from tests.axes.context.test_context import check, packed_positions
from tests.axes.context.test_dropout_over_cp import check as check_dropout
from tests.support import models
from tests.support.context import alone, batch_of, error_of, family, on_mesh, softmax_in_float64
from tests.support.models import LATENT, ROUTED_SIX
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

LENGTH = 13
HYBRIDS = ["qwen3_next", "qwen3_5_moe_text", "jamba", "lfm2_moe", "minimax", "nemotron_h", "granitemoehybrid"]
MIXTURES = [*HYBRIDS, "deepseek_v32", "llama4_text", "gpt_oss", "gemma4_text"]
SHARED_KEYS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED_KEYS |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67}
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "ep": 2}),
    ({"cp": 2}, {}),
    ({"cp": 2, "tp": 2}, {"overlap": "chunked"}),
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ({"cp": 2}, {"ep": 2}),
    ({"cp": 4}, {"ulysses": 2, "recompute": "full"}),
    ({"dp": 2, "cp": 2}, {"zero": 1, "ep": 4}),
]


@pytest.mark.variants(every=70)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture(name, sizes, options):
    check(family(name), sizes, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(("sizes", "options"), MESHES[2:4], ids=str)
def test_indices_that_layers_share(monkeypatch, sizes, options):
    """GLM's sparse attention takes the tokens that an earlier layer chose: [batch, tokens, k], gathered too."""
    config = {**ROUTED_SIX, **LATENT, "index_n_heads": 4, "index_head_dim": 12, "index_topk": 5}
    config |= {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    monkeypatch.setitem(models.MIXTURES, "glm_moe_dsa", ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", config))
    check(family("glm_moe_dsa"), sizes, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("name", HYBRIDS[:5])
def test_pipelines(name):
    check(family(name, tie_word_embeddings=False), {"pp": 2, "cp": 2}, num_microbatches=2)


@pytest.mark.sweep
@pytest.mark.parametrize(("sizes", "options"), MESHES[1:3], ids=str)
def test_keys_of_an_earlier_layer(sizes, options):
    """Gemma 4's last layers attend to the keys and values of earlier ones, which the ring sends once more."""
    check(family("gemma4_text", **SHARED_KEYS), sizes, **options)


@pytest.mark.parametrize("name", ["deepseek_v32", *(pytest.param(name, marks=pytest.mark.sweep) for name in HYBRIDS)])
@pytest.mark.parametrize(("cp", "length"), [(2, LENGTH), (2, 3)])
def test_padding(name, cp, length):
    """On the left and on the right; where a rank has a single token, models drop its mask."""
    mask, count = torch.ones(2, length, dtype=torch.int64), max(1, length // 4)
    mask[0, -count:] = mask[1, :count] = 0
    model, (ids, targets) = family(name), batch_of(length)
    targets[mask == 0] = -100
    expected = alone(model, ids, targets, attention_mask=mask)
    sizes, inputs = {"cp": cp}, {"attention_mask": mask}
    for result in run_ranks(cp, lambda rank: on_mesh(model, sizes, ids, targets, inputs)):
        error, where = error_of(result, expected)
        assert error <= 1e-12, where


@pytest.mark.parametrize("kind", ["sdpa", pytest.param("eager", marks=pytest.mark.sweep)])
def test_packed_documents(kind):
    model = family("deepseek_v32", attn_implementation=kind)
    with softmax_in_float64():
        check(model, {"cp": 2}, inputs={"position_ids": packed_positions(LENGTH)})


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_dropout_inside(sizes):
    """Weights of gathered attention are dropped by their index in all of them, as without cp."""
    model = family("deepseek_v32", attn_implementation="sdpa", attention_dropout=0.3).train()
    check_dropout(model, sizes)


class Recurrence(nn.Module):
    """A running sum with a gate, and one parameter of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, states: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        state = states["last"] = (hidden * self.weight.sigmoid()).cumsum(1)
        return self.out(state), None


class Reader(Recurrence):
    """Attention to all tokens of a state that an earlier module has stored."""

    def forward(self, hidden: torch.Tensor, states: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        keys = states["last"].unsqueeze(1)
        out = F.scaled_dot_product_attention((hidden * self.weight).unsqueeze(1), keys, keys, is_causal=True)
        return self.out(out.squeeze(1)), None


class Own(nn.Module):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(67, 12), Recurrence(12), Reader(12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, states = self.embed(ids), {}
        hidden = hidden + self.first(hidden, states)[0]
        return hidden + self.second(hidden, states=states)[0]


TEXT = """
schema_version: 1
tensor_parallel: {embed: replicate, "{first,second}": replicate, "{first,second}.out": replicate}
attention: {"*": causal}
positions: none
"""


def own_plan(lines: str = '"{first,second}": gathered') -> Any:
    return parse_plan(TEXT.replace('"*": causal', lines))


@pytest.mark.parametrize("over_tp", [False, True])
def test_a_model_of_ones_own_that_stores_states(over_tp):
    model, ids = Own().double(), batch_of(LENGTH)[0]
    expected = model(ids)
    expected.square().sum().backward()

    def body(rank):
        copied, sizes = copy.deepcopy(model), {"cp": 2, "tp": 2} if over_tp else {"cp": 2}
        copied.zero_grad()
        apply = partial(parallelize_module if over_tp else context_parallel, own_reduction=True)
        net = apply(copied, build_mesh("cpu", **sizes), own_plan())
        out = net(ids)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in net.named_parameters()}
        return out.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}

    results = run_ranks(4 if over_tp else 2, body)[:: 2 if over_tp else 1]
    assert torch.allclose(torch.cat([out for out, _ in results], 1), expected, rtol=1e-12)
    total = {name: sum(grads[name] for _, grads in results) for name in results[0][1]}
    assert worst(total, {name: p.grad for name, p in model.named_parameters()})[0] <= 1e-12


@pytest.mark.parametrize(
    ("full", "ring", "ulysses", "balanced"), [(13, 4, 1, True), (13, 2, 2, False), (3, 3, 1, False)]
)
def test_the_order_of_gathered_tokens(full, ring, ulysses, balanced):
    layout = SequenceLayout(full, ring, ulysses, balanced)
    padded = max(layout.num_tokens(rank) for rank in range(layout.size))
    stored = []
    for rank in range(layout.size):
        tokens = [position for run in layout.of_rank(rank) for position in range(*run)]
        stored += tokens + [-1] * (padded - len(tokens))
    runs = layout.gathered_runs(padded)
    assert [stored[index] for run in runs for index in range(*run)] == list(range(full))


def refuse(
    model: nn.Module, kind: Any, slug: str, *named: str, plan: Any = None, sizes: Any = None, **call: Any
) -> None:
    def body(rank):
        with refused(kind, slug, *named):
            net = context_parallel(copy.deepcopy(model), build_mesh("cpu", **(sizes or {"cp": 2})), plan)
            net(input_ids=torch.ones(2, 6, dtype=torch.int64), **call)

    run_ranks(2, body)


def test_what_is_refused():
    refuse(Own(), PlanError, "two-attentions", "first is", plan=own_plan('"{first,second}": gathered, first: causal'))
    refuse(Own(), PlanError, "unmatched-attention", plan=own_plan('"third?": gathered'))
    refuse(Own(), PlanError, "unmatched-attention", plan=own_plan('"third": gathered'))
    refuse(family("qwen3_next"), ModelError, "cache-over-cp", use_cache=True)
    mixed = 'model.layers.0.self_attn: gathered, "model.layers.1.self_attn": causal'
    named = ("model.layers.0.self_attn", "takes a mask of the full sequence")
    plan = parse_plan(TEXT.replace('"*": causal', mixed).replace("embed: replicate", '"**": replicate'))
    refuse(family("llama"), ModelError, "mask-over-cp", *named, plan=plan)


def test_overlap_of_a_gathered_module_that_was_installed_before():
    def body(rank):
        mesh = build_mesh("cpu", cp=2, tp=2)
        net = parallelize_module(family("granitemoehybrid"), mesh["tp"], overlap="chunked")
        with refused(ModelError, "gathered-overlap", "model.layers.0.mamba"):
            context_parallel(net, mesh)

    run_ranks(4, body)
