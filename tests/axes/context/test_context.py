"""Stock models on `cp` equal the unsharded models: loss, every gradient, the optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import (
    ModelError,
    ParallelizeError,
    ShapeError,
    build_mesh,
    context_parallel,
    gather_sequence,
    parallelize_model,
    split_sequence,
)
from parallelize.axes.batch.input_batch import documents_of
from parallelize.plan.plan_file import parse_plan
from tests.support.context import alone, batch_of, error_of, family, on_mesh
from tests.support.models import FAMILIES
from tests.support.threads import run_ranks

LENGTH = 13


def check(model, sizes, limit=1e-12, length=LENGTH, inputs=None, batch=2, **options):
    ids, targets = batch_of(length, batch)
    inputs = inputs or {}
    expected = alone(model, ids, targets, **inputs)
    world = torch.tensor(list(sizes.values())).prod().item()
    for result in run_ranks(world, lambda rank: on_mesh(model, sizes, ids, targets, inputs, **options)):
        error, name = error_of(result, expected)
        assert error <= limit, name


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, ulysses):
    check(family(name), {"cp": 2}, ulysses=ulysses)


COMPOSED = [
    ({"cp": 2, "tp": 2}, {"ulysses": 2, "sequence_parallel": True}),
    ({"cp": 4, "tp": 2}, {"ulysses": 2, "recompute": "full"}),
    ({"cp": 2}, {"recompute": "selective", "ulysses": 2, "recompute_save": ("collectives",)}),
    ({"dp": 2, "cp": 2}, {"zero": 2}),
    ({"pp": 2, "cp": 2}, {"num_microbatches": 2, "schedule": "zbv"}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"num_microbatches": 2, "sequence_parallel": True, "ulysses": 2}),
    ({"pp": 2, "dp": 2, "cp": 2}, {"num_microbatches": 2, "zero": 1}),
]


@pytest.mark.variants(every=7)
@pytest.mark.parametrize(("sizes", "options"), COMPOSED)
def test_with_other_axes(sizes, options):
    """Where the matrix has no such mesh."""
    batch = 4 if "pp" in sizes and "dp" in sizes else 2
    check(family("llama", num_hidden_layers=4), sizes, batch=batch, **options)


def packed_positions(length):
    """Two sequences, of two and three documents."""
    first = torch.cat([torch.arange(4), torch.arange(length - 4)])
    second = torch.cat([torch.arange(1), torch.arange(7), torch.arange(length - 8)])
    return torch.stack([first, second])


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_documents(name, ulysses):
    check(family(name), {"cp": 2}, inputs={"position_ids": packed_positions(LENGTH)}, ulysses=ulysses)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_padding(ulysses):
    """Of a bidirectional model; the matrix has causal ones."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, -4:] = 0  # padding at the end must not change earlier tokens, and its targets are ignored
    model, (ids, targets) = family("bert"), batch_of(LENGTH)
    targets[mask == 0] = -100
    expected = alone(model, ids, targets, attention_mask=mask)
    inputs = {"attention_mask": mask}
    for result in run_ranks(2, lambda rank: on_mesh(model, {"cp": 2}, ids, targets, inputs, ulysses=ulysses)):
        error, where = error_of(result, expected)
        assert error <= 1e-12, where


def test_documents_and_masks_become_one():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])
    assert documents_of(torch.arange(7).unsqueeze(0), torch.ones(2, 7)) is None
    assert documents_of(positions, None).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert documents_of(positions, mask).tolist() == [[0, 0, 0, 1, 1, 2, -3], [-1, 0, 0, 1, 1, 2, 2]]


class Block(nn.Module):
    """Attention by PyTorch's own function."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 6).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A user's own model."""

    def __init__(self, eager=False):
        super().__init__()
        self.embed, self.at = nn.Embedding(67, 24), nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 67)

    def forward(self, ids, indices):
        x = self.embed(ids) + self.at(indices)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


PLAN = """
schema_version: 1
tensor_parallel:
  embed: embedding
  at: replicate
  blocks.*.{qkv,out}: replicate
  head: replicate
attention: {blocks.*: causal}
positions: indices
"""


def own_plan(text=PLAN):
    return parse_plan(text)


@pytest.mark.parametrize(("cp", "ulysses", "length"), [(2, 1, 13), (4, 2, 13), (4, 1, 5), (4, 4, 3)])
def test_split_and_gather_sequences(cp, ulysses, length):
    sequences = torch.randn(2, length, 3, dtype=torch.float64)
    weight = torch.randn_like(sequences)

    def body(rank):
        model = context_parallel(family("llama"), build_mesh("cpu", cp=cp), ulysses=ulysses)
        local = split_sequence(model, sequences).requires_grad_()
        gathered = gather_sequence(model, local, full=length)
        assert torch.equal(gathered, sequences)
        (gathered * weight).sum().backward()
        assert torch.equal(local.grad, split_sequence(model, weight))
        flat = gather_sequence(model, split_sequence(model, sequences[0], 0), 0, length)
        assert torch.equal(flat, sequences[0])
        if length > 5:
            logits = model(input_ids=torch.ones(1, length, dtype=torch.int64)).logits
            assert gather_sequence(model, logits).shape == (1, length, 67)
        with pytest.raises(ShapeError, match="wrong-rows"):
            gather_sequence(model, local.detach(), full=length + 8)

    run_ranks(cp, body)


def refused(model, slug, sizes=None, call=None, plan=None, **options):
    def body(rank):
        mesh = build_mesh("cpu", **(sizes or {"cp": 2}))
        with pytest.raises(ParallelizeError, match=slug):
            parallel = parallelize_model(copy.deepcopy(model), mesh, plan, **options)
            ids = torch.ones(2, 6, dtype=torch.int64)
            (call or (lambda parallel: parallel.module(input_ids=ids)))(parallel)

    run_ranks(2, body)


IDS = torch.ones(2, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("slug", "call"),
    [
        ("given-mask", lambda parallel: parallel.module(input_ids=IDS, attention_mask=torch.zeros(2, 1, 6, 6))),
        ("cache-over-cp", lambda parallel: parallel.module(input_ids=IDS, use_cache=True)),
        (
            "bad-position-ids",
            lambda parallel: parallel.module(input_ids=IDS, position_ids=torch.arange(4).unsqueeze(0)),
        ),
        ("outside-context", lambda parallel: parallel.module.model.layers[0].self_attn(*attention_inputs())),
        ("no-sequence", lambda parallel: parallel.module()),
        ("short-sequence", lambda parallel: parallel.module(input_ids=IDS[:, :1])),
        ("outside-context", lambda parallel: gather_sequence(parallel, torch.zeros(1, 3))),
    ],
)
def test_calls_that_are_refused(slug, call):
    refused(family("llama"), slug, call=call)


def attention_inputs():
    return torch.zeros(1, 3, 48, dtype=torch.float64), (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)), None


def test_models_and_plans_that_are_refused():
    llama = family("llama")
    refused(llama, "bad-ulysses", ulysses=3)
    refused(family("bert"), "labels-over-cp", call=lambda parallel: parallel.module(input_ids=IDS, labels=IDS))
    refused(family("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rotary")
    refused(Own(), "no-attention", plan=own_plan(PLAN.replace("attention: {blocks.*: causal}", "")))
    refused(Own(), "unmatched-attention", plan=own_plan(PLAN.replace("{blocks.*:", "{block.*:")))
    refused(Own(), "no-positions", plan=own_plan(PLAN.replace("indices", "position_ids")))
    indices = torch.arange(6).unsqueeze(0)
    call = {"call": lambda parallel: parallel.module(IDS, indices)}
    refused(Own(), "unplanned-attention", plan=own_plan(PLAN.replace("{blocks.*:", "{blocks.0:")), **call)
    refused(Own(), "no-attention-call", plan=own_plan(PLAN.replace("{blocks.*:", "{embed: causal, blocks.*:")), **call)
    refused(Own(), "attention-kind", plan=own_plan(PLAN.replace("causal", "bidirectional")), **call)


def test_cp_of_one_rank_changes_nothing():
    model, (ids, _) = family("llama"), batch_of(LENGTH)
    expected = model(input_ids=ids).logits

    def body(rank):
        mesh = build_mesh("cpu", dp=1, cp=1)
        sharded = context_parallel(copy.deepcopy(model), mesh)
        assert torch.equal(sharded(input_ids=ids).logits, expected)
        assert torch.equal(split_sequence(sharded, ids), ids)
        assert torch.equal(gather_sequence(sharded, ids), ids)

    run_ranks(1, body)


def test_ambiguous_recompute_is_refused():
    model = family("llama")

    def body(rank):
        sharded = context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2))
        sharded.gradient_checkpointing_enable()
        first = sharded(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum()
        second = sharded(input_ids=torch.ones(1, 6, dtype=torch.int64)).logits.sum()
        with pytest.raises(ModelError, match="ambiguous-sequence"):
            (first + second).backward()

    run_ranks(2, body)


def test_there_is_no_cache():
    model = family("llama")

    def body(rank):
        sharded = context_parallel(copy.deepcopy(model).eval(), build_mesh("cpu", cp=2))
        assert sharded(input_ids=IDS).past_key_values is None

    run_ranks(2, body)
