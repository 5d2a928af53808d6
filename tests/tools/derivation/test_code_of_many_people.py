"""Inputs in objects, and a head that is tied by hand: forwards that plans are derived for as for those of plain
tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import derive_plan
from parallelize.plan.models.nested_tensors import map_tensors, tensors_in
from tests.tools.derivation.own_models import Mlp

WIDTH, VOCABULARY = 16, 30
T = torch.Tensor
IDS = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
SCALES = torch.linspace(0.5, 1.5, 14).view(2, 7, 1)


@dataclass(frozen=True)
class Batch:
    ids: T
    scales: T


@dataclass
class Slots:
    __slots__ = ("ids", "scales")
    ids: T
    scales: T


class OfBatch(nn.Module):
    """Reads ids, and numbers of the dtype of its weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.mlp = nn.Embedding(VOCABULARY, WIDTH), Mlp(WIDTH, 40)
        self.lift, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Any) -> T:
        ids, scales = (batch["ids"], batch["scales"]) if isinstance(batch, dict) else (batch.ids, batch.scales)
        x = self.embed(ids) + self.lift(scales)
        return self.head(x + self.mlp(x))


FORMS = [
    Batch(IDS, SCALES),
    Slots(IDS, SCALES),
    SimpleNamespace(ids=IDS, scales=SCALES),
    {"ids": IDS, "scales": SCALES},
]


@pytest.mark.parametrize("batch", FORMS, ids=lambda batch: type(batch).__name__)
def test_inputs_in_an_object(batch):
    derived = derive_plan(OfBatch(), {"batch": batch})
    assert derived.proof is not None and set(derived.whole) <= {"lift"}
    words = {rule.pattern: rule.style.word for rule in derived.plan.rules}
    assert (words["mlp.up"], words["mlp.down"]) == ("colwise", "rowwise")


@pytest.mark.parametrize("batch", [*FORMS, (IDS, [SCALES])], ids=lambda batch: type(batch).__name__)
def test_tensors_of_an_object_are_changed_in_a_copy(batch):
    doubled = map_tensors(lambda x: 2 * x, batch)
    assert type(doubled) is type(batch) and [*map(id, tensors_in(batch))] == [id(IDS), id(SCALES)]
    assert all(torch.equal(a, 2 * b) for a, b in zip(tensors_in(doubled), (IDS, SCALES), strict=True))
    assert map_tensors(lambda x: 2 * x, 3) == 3


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Mlp(WIDTH, 40) for _ in range(2)])


class TiedByHand(nn.Module):
    """The head is a matmul with the weight of a table, by a local name of the module that has it."""

    def __init__(self):
        super().__init__()
        self.core = Core()

    def forward(self, ids: T) -> T:
        core = self.core
        x = core.embed(ids)
        for block in core.blocks:
            x = x + block(x)
        return x @ core.embed.weight.t()


def test_a_head_that_is_tied_by_hand():
    derived = derive_plan(TiedByHand(), {"ids": IDS})
    words = {rule.pattern: rule.style.word for rule in derived.plan.rules}
    assert words["core.blocks.*.up"] == "colwise" and derived.proof is not None
    assert words.get("core.embed", "replicate") == "replicate"


@pytest.mark.sweep
def test_layers_that_share_their_parameters():
    """A small ALBERT of one's own, whose layers are one module."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(embedding_size=16, hidden_size=32, num_attention_heads=4, intermediate_size=72, num_hidden_layers=2)
    model = transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes)
    )
    derived = derive_plan(model, {"input_ids": IDS})
    words = {rule.pattern: rule.style.word for rule in derived.plan.rules}
    layer = "albert.encoder.albert_layer_groups.*.albert_layers.*"
    assert derived.share > 0.8 and words[f"{layer}.ffn"] == "colwise" and words[f"{layer}.attention.dense"] == "rowwise"
