"""What a review of context parallelism found, each as a test."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import (
    HandshakeError,
    ModelError,
    ParallelizeError,
    PlanError,
    build_mesh,
    context_parallel,
    explain,
    gather_sequence,
    parallelize_model,
    parallelize_module,
    recompute,
    verify,
)
from parallelize.context.state import context_of
from parallelize.plan.load import parse_plan
from tests.sim.test_ulysses_style import plan_of
from tests.support.context import batch_of, family
from tests.support.parity import worst
from tests.support.threads import run_ranks

IDS = torch.arange(3, 15).view(2, 6)


def over_cp(model, **options):
    return context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2), **options)


def refused(slug, model, *args, kind=ModelError, **inputs):
    def body(rank):
        with pytest.raises(kind, match=slug):
            over_cp(model)(*args, **inputs)

    run_ranks(2, body)


def outputs(model, **inputs):
    """Logits of both, whole."""
    want = model(**inputs, **({} if "bert" in type(model).__name__.lower() else {"use_cache": False})).logits

    def body(rank):
        mine = over_cp(model)
        return gather_sequence(mine, mine(**inputs).logits)

    return run_ranks(2, body)[0].detach(), want.detach()


def llama_head(name, **config):
    import transformers

    made = family("llama").config
    for key, value in config.items():
        setattr(made, key, value)
    return getattr(transformers, name)(made).double()


def test_heads_that_pool_one_row_are_refused():
    import transformers

    classifier = llama_head("LlamaForSequenceClassification", num_labels=3)
    refused("one-row", classifier, input_ids=IDS)
    refused("one-row", classifier, input_ids=IDS, return_dict=False)
    refused("labels-over-cp", classifier, input_ids=IDS, labels=torch.tensor([0, 1]))
    bert = transformers.BertForPreTraining(family("bert").config).double()
    refused("one-row", bert, input_ids=IDS)
    refused("one-row", family("llama"), input_ids=IDS, logits_to_keep=1)


def test_a_loss_that_is_no_sum_over_next_tokens_is_refused():
    tokens = llama_head("LlamaForTokenClassification", num_labels=3).eval()
    refused("labels-over-cp", tokens, input_ids=IDS, labels=IDS % 3)


@pytest.mark.parametrize("given", [{"num_items_in_batch": 100}, {"shift_labels": (IDS * 5) % 67}])
def test_what_the_caller_says_of_the_loss_holds(given):
    model = family("llama")
    want = model(input_ids=IDS, labels=IDS, **given).loss.detach()

    def body(rank):
        return over_cp(model)(input_ids=IDS, labels=IDS, **given).loss.detach()

    assert torch.allclose(sum(run_ranks(2, body)), want, rtol=1e-6)


RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])


@pytest.mark.parametrize("name", ["llama", "mistral", "opt", "bert", "gpt2"])
@pytest.mark.parametrize("mask", ["none", "all", "left"])
def test_positions_and_masks_mean_what_they_mean_to_the_stock_model(name, mask):
    """Documents are looked for only where the model looks for them; a model may count positions by its mask."""
    inputs = {"input_ids": IDS}
    if mask != "left":
        inputs["position_ids"] = RESTARTING
    if mask != "none":
        inputs["attention_mask"] = torch.ones_like(IDS)
    if mask == "left":
        inputs["attention_mask"][0, :2] = 0
    got, want = outputs(family(name).eval(), **inputs)
    real = inputs["attention_mask"].bool() if mask == "left" else torch.ones_like(IDS).bool()
    assert (got - want)[real].abs().max() <= 1e-12 * want[real].abs().max()


def test_verify_pads_in_front_over_cp():
    assert verify("opt", mesh="cp=2").ok


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}])
def test_generation_is_refused(axes):
    model = family("llama").eval()

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        mine = copy.deepcopy(model)
        mine = parallelize_module(mine, mesh) if "tp" in axes else context_parallel(mine, mesh)
        with pytest.raises(ParallelizeError, match="generate-over-cp"):
            mine.generate(input_ids=IDS, max_new_tokens=2, use_cache=False)

    run_ranks(2 * axes.get("tp", 1), body)


class Beside(nn.Module):
    """A planned block, and attention of PyTorch's module beside it."""

    def __init__(self, other):
        super().__init__()
        self.q, self.other = nn.Linear(8, 8), other

    def forward(self, x, places=None, *extra, more=None):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return x if places is None else x + places.unsqueeze(-1)


TEXT = """
schema_version: 1
tensor_parallel: {q: replicate}
attention: {"q": causal}
positions: places
"""


@pytest.mark.parametrize("other", [nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, batch_first=True)])
def test_modules_that_attend_by_themselves_are_refused(other):
    def body(rank):
        with pytest.raises(ModelError, match="unplanned-attention"):
            over_cp(Beside(other), plan=parse_plan(TEXT.replace("q: replicate", "'{q,other}*': replicate")))

    run_ranks(2, body)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Beside(None)

    def forward(self, x, *extra, places=None):
        for one in extra:
            x = x + one
        return self.block(x) + places.unsqueeze(-1)


def test_arguments_keep_their_places():
    text = """
schema_version: 1
tensor_parallel: {block.q: replicate}
attention: {block: causal}
positions: places
"""
    model = Own().double()
    x, first, second = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    want = model(x, first, second, places=torch.arange(6).unsqueeze(0))

    def body(rank):
        mine = over_cp(model, plan=parse_plan(text))
        with pytest.raises(TypeError):
            mine(x, nothing=1)
        return gather_sequence(mine, mine(x, first, second))

    assert torch.allclose(run_ranks(2, body)[0], want, rtol=1e-12)


def test_reentrant_checkpointing_is_refused():
    model, embeds = family("llama"), torch.randn(2, 6, 48, dtype=torch.float64)

    def body(rank):
        mine = over_cp(model)
        layer = mine.model.layers[0]
        stock = layer.forward
        layer.forward = lambda x, **rest: checkpoint(lambda y: stock(y, **rest), x, use_reentrant=True)
        with pytest.raises(ModelError, match="reentrant"):
            mine(inputs_embeds=embeds.clone().requires_grad_()).logits.sum().backward()

    run_ranks(2, body)


def test_ranks_that_differ_are_told():
    model = family("llama")

    def settings(rank):
        with pytest.raises(HandshakeError):
            over_cp(model, ulysses=1 + rank)

    def batches(rank):
        with pytest.raises(HandshakeError, match="over cp"):
            over_cp(model)(input_ids=IDS + rank)

    run_ranks(2, settings)
    run_ranks(2, batches)


def test_targets_without_a_row_for_each_token_are_refused():
    def body(rank):
        parallel = parallelize_model(family("llama"), build_mesh("cpu", cp=2))
        for targets in (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64)):
            with pytest.raises(ParallelizeError, match="wrong-rows"):
                parallel.step(input_ids=IDS, targets=targets)

    run_ranks(2, body)


def test_explain_times_sums_over_the_world():
    options = {"sequence": 1024, "batch": 1}
    alone = explain("llama", None, "dp=4", **options).time.data_s
    mixed = explain("llama", None, "dp=2,cp=2", **options).time.data_s
    assert 0.5 * alone < mixed < 2 * alone


def test_explain_of_float32_over_cp_ends_soon():
    import time

    began = time.perf_counter()
    explain("llama-3-8b", None, "cp=8", sequence=131072, batch=1)
    assert time.perf_counter() - began < 60  # it did not end in minutes


def test_every_stage_is_done_looking_after_a_step():
    def body(rank):
        parallel = parallelize_model(family("llama"), build_mesh("cpu", pp=2, cp=2), num_microbatches=2)
        ids, targets = batch_of(9, 2)
        parallel.step(input_ids=ids, targets=targets)
        return context_of(parallel.module).checked

    assert run_ranks(4, body) == [True] * 4


def test_the_style_ulysses_and_cp_are_not_mixed():
    def body(rank):
        with pytest.raises(PlanError, match="ulysses-over-cp"):
            parallelize_module(family("llama"), build_mesh("cpu", cp=2, tp=2), plan_of("llama"), sequence_parallel=True)

    run_ranks(4, body)


def test_attentions_and_dropout_are_refused():
    refused("attentions-are-shards", family("llama"), input_ids=IDS, output_attentions=True)
    refused("dropout-over-cp", family("gpt2", resid_pdrop=0.5).train(), input_ids=IDS)

    def body(rank):
        over_cp(family("gpt2", resid_pdrop=0.5).eval())(input_ids=IDS)

    run_ranks(2, body)


def test_autocast_is_that_of_the_stock_model():
    model = family("llama", torch.float32)
    kinds = []
    with torch.autocast("cpu", torch.bfloat16):
        want = model(input_ids=IDS).logits
    exact = model.double()(input_ids=IDS).logits
    model.float()

    def body(rank):
        from parallelize.context import attend

        real = attend.ring_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                attend,
                "ring_attention",
                lambda q, k, v, *rest: kinds.append({q.dtype, k.dtype, v.dtype}) or real(q, k, v, *rest),
            )
            mine = over_cp(model)
            with torch.autocast("cpu", torch.bfloat16):
                return gather_sequence(mine, mine(input_ids=IDS).logits)

    got = run_ranks(2, body)[0]
    assert all(kind == {torch.bfloat16} for kind in kinds)
    assert (got - exact).abs().mean() <= 2 * (want - exact).abs().mean()


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_recomputed_window_is_that_of_its_own_forward(ulysses):
    """A later, shorter forward, which the window covers whole, must not take it from the one that is recomputed."""
    model = family("mistral", sliding_window=7)
    long, short = torch.arange(3, 27).view(1, 24), IDS
    reference = copy.deepcopy(model)
    (reference(input_ids=long).logits.sum() + reference(input_ids=short).logits.sum()).backward()
    want = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank):
        mine = recompute(over_cp(model, ulysses=ulysses), "full", units="model.layers.*")
        first, second = mine(input_ids=long).logits.sum(), mine(input_ids=short).logits.sum()
        (first + second).backward()
        return {name: p.grad for name, p in mine.named_parameters()}

    parts = run_ranks(2, body)
    assert worst({name: sum(part[name] for part in parts) for name in want}, want)[0] <= 1e-12
