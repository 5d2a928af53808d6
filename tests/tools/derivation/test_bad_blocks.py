"""A block that cannot be sharded is left whole by itself, with its reason: what is beside it is sharded. And what
models are made of that once failed all of a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from parallelize import derive_plan
from tests.tools.derivation import own_models as models
from tests.tools.derivation.test_derived_plans import derived_from, rules_of

T = torch.Tensor
WIDTH, HIDDEN = 24, 40


class DividedByWidth(models.Mlp):
    """Another number on a shard, which no operation shows."""

    def forward(self, x: T) -> T:
        y = self.up(x)
        return self.down(y / y.shape[-1] ** 0.5)


class HalfPartial(models.Mlp):
    """A parameter of each hidden feature, one for all of them, and one that scales the sum."""

    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.slope, self.shift, self.scale = (nn.Parameter(torch.rand(size)) for size in (inner, 1, width))

    def forward(self, x: T) -> T:
        y = self.up(x)
        return self.down(y * (y * self.slope).sigmoid() + self.shift) * self.scale


class Parametrized(models.Mlp):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        nn.utils.parametrizations.weight_norm(self.up)


class Listed(nn.Module):
    """An MLP of bare parameters."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(width, inner) * 0.2, torch.randn(inner, width) * 0.2])

    def forward(self, x: T) -> T:
        return (x @ self.weights[0]).relu() @ self.weights[1]


class Model(nn.Module):
    """Attention beside such an MLP. `wrap`: of what the forward returns."""

    def __init__(self, mlp: nn.Module, wrap=lambda logits: logits, blocks: int = 1):
        super().__init__()
        self.embed, self.wrap = nn.Embedding(models.VOCABULARY, WIDTH), wrap
        block = models._PreNorm(models.SplitAttention(WIDTH, 4), mlp, WIDTH)
        self.blocks = nn.ModuleList([block] * blocks)
        self.head = nn.Linear(WIDTH, models.VOCABULARY)

    def forward(self, ids: T):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.head(x))


ATTENTION = {"blocks.*.attn.c_attn": "colwise(heads + heads + heads)", "blocks.*.attn.c_proj": "rowwise(heads)"}


def derived_with(mlp: nn.Module, **options):
    derived = derived_from(lambda: Model(mlp, **options), models.ids)
    rules = rules_of(derived)
    assert ATTENTION.items() <= rules.items() and rules["embed"] == "embedding"
    return derived, rules


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        pytest.param(DividedByWidth, "the proof failed with it sharded", marks=pytest.mark.sweep),
        (Parametrized, "its weight is computed from other parameters (torch.nn.utils.parametrize)"),
    ],
)
def test_a_block_that_cannot_be_sharded_is_left_whole_by_itself(mlp, reason):
    derived, rules = derived_with(mlp(WIDTH, HIDDEN))
    assert derived.whole["blocks.0.mlp.up"] == reason and not any("mlp.up" in pattern for pattern in rules)
    assert {"blocks.0.mlp.up", "blocks.0.mlp.down"} == set(derived.whole)


def test_parameters_of_one_module_of_which_some_are_sharded():
    _, rules = derived_with(HalfPartial(WIDTH, HIDDEN))
    assert rules["blocks.*.mlp.slope"] == "shard(0)" and rules["blocks.*.mlp.up"] == "colwise"
    assert rules["blocks.*.mlp.shift"] == "replicate(gradient=partial)" and "blocks.*.mlp" not in rules


@pytest.mark.sweep
def test_a_list_of_parameters():
    derived, _ = derived_with(Listed(WIDTH, HIDDEN))
    assert derived.share > 0.6


@dataclass
class Output:
    logits: T
    loss: T


@pytest.mark.sweep
def test_a_data_class_is_an_output():
    _, rules = derived_with(models.Mlp(WIDTH, HIDDEN), wrap=lambda logits: Output(logits, logits.square().mean()))
    assert rules["head"] == "colwise(output=full)"


@pytest.mark.sweep
def test_a_block_in_two_places_of_a_list():
    _, rules = derived_with(HalfPartial(WIDTH, HIDDEN), blocks=2)
    assert rules["blocks.*.mlp.slope"] == "shard(0)" and rules["blocks.*.mlp.up"] == "colwise"


def test_the_vocabulary_is_sharded_where_nothing_else_is():
    derived = derive_plan(models.LstmModel(), models.ids())
    assert rules_of(derived) == {"embed": "embedding", "head": "colwise(output=vocabulary)", "**": "replicate"}
    assert derived.proof.ok
