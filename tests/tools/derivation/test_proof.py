"""A wrong plan is not proven, whatever made it wrong, and so it is not handed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import derive_plan
from parallelize.base.errors import ModelError
from parallelize.plan.choose import shipped_plan_of
from parallelize.plan.dims import operations
from parallelize.plan.dims.factor_analysis import FactorAnalysis
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import source_of
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.derivation import derive
from parallelize.tools.derivation.draft import Drafting
from parallelize.tools.derivation.proof import Proof, projected, provable, prove
from tests.support.models import tiny_model
from tests.support.refused import refused
from tests.tools.derivation import own_models as models
from tests.tools.derivation.test_derived_plans import PLANS


def proof_of(text, model=None, inputs=models.ids):
    model = model or models.TinyGpt()
    return prove(provable(source_of(model), model, inputs()), parse_plan(text, "a test", name="test"), 2)


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("colwise(heads + heads + heads)", "colwise(heads)", "attn cuts the output of transformer.h.*.attn.c_attn"),
        ("colwise(heads + heads + heads)", "colwise", "units-do-not-meet: transformer.h.*.attn.c_attn"),
        ("n_embd: heads, n_head: heads", "n_embd: heads", "module  transformer.h.0.attn.c_attn"),
        ("n_embd: heads, n_head: heads", "n_head: heads", "transformer.h.0.attn"),
        ("mlp.down: rowwise", "mlp.down: replicate", "mlp"),
        ("norm{1,2}: sequence", "norm{1,2}: replicate", "norm"),
    ],
)
def test_mistakes_are_found(right, wrong, named):
    text = PLANS["TinyGpt"]
    assert right in text
    proof = proof_of(text.replace(right, wrong))
    assert not proof.ok and named in str(proof)


def test_a_right_plan_is_proven():
    proof = proof_of(PLANS["TinyGpt"])
    assert proof.ok and "plain, sequence parallel" in str(proof) and proof.slugs == ()


def test_what_is_refused_in_the_forward_has_its_slug():
    proof = proof_of(PLANS["TinyGpt"].replace("mlp.down: rowwise", "mlp.down: replicate"))
    assert not proof.ok and proof.slugs == ("shard-misread",)


def test_a_router_that_draws_in_training_is_proven_with_the_same_noise():
    model = tiny_model("phimoe")
    source = source_of(model)
    assert prove(provable(source, model, inputs_of(source, model)), shipped_plan_of(model.config), 2).ok


def test_each_element_of_each_output_counts():
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    projected({"a": a, "more": (b, torch.arange(3))}, None).backward()
    assert (a.grad != 0).all() and (b.grad != 0).all()
    assert len({*a.grad.flatten().tolist()}) == 6


def test_a_loss_that_the_forward_returns_is_compared():
    loss = torch.ones((), requires_grad=True)
    projected(SimpleNamespace(loss=loss), None).backward()
    assert loss.grad > 0.1


# -- what is derived by a broken rule ----------------------------------------------------------------------------------


class Softmaxed(nn.Module):
    """Nothing can be sharded in the first pair: a softmax needs its features."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(*sizes) for sizes in ((8, 22), (22, 8), (8, 12), (12, 8)))

    def forward(self, x):
        x = x + self.b(self.a(x).softmax(-1))
        return x + self.d(self.c(x).relu())


def softmaxed():
    return {"x": torch.randn(2, 5, 8)}


def test_a_rule_that_forgets_a_dim(monkeypatch):
    monkeypatch.setitem(operations.RULES, "_softmax", operations._same)
    derived = derive_plan(Softmaxed(), softmaxed())
    assert {rule.pattern: str(rule.style) for rule in derived.plan.rules} == {
        "c": "colwise",
        "d": "rowwise",
        "**": "replicate",
    }
    assert derived.whole == {"a": "the proof failed with it sharded", "b": "the proof failed with a sharded"}
    assert derived.proof.ok and derived.share < 0.5


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class TwoPairs(nn.Module):
    """With a matrix that no linear has, and an attention that does not run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"first": Pair(22), "second": Pair(12), "mix": nn.Bilinear(8, 8, 8)}) for _ in range(2)
        )
        self.tower = nn.ModuleList([nn.MultiheadAttention(8, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer["second"](layer["first"](x))
            x = x + layer["mix"](x, x)
        return x


def test_a_refusal_that_names_a_module_beside_linears_leaves_those_whole(monkeypatch):
    def refuse(source, plan, tp):
        if any(rule.pattern == "layers.*.first.up" for rule in plan.rules):
            return Proof(
                False, "unclear-gradient: layers.*.first.norm.weight reads shards", slugs=("unclear-gradient",)
            )
        return prove(source, plan, tp)

    monkeypatch.setattr("parallelize.tools.derivation.derive.prove", refuse)
    derived = derive_plan(TwoPairs(), softmaxed())
    sharded = {rule.pattern for rule in derived.plan.rules if str(rule.style) in ("colwise", "rowwise")}
    assert sharded == {"layers.*.second.up", "layers.*.second.down"}


def test_what_does_not_run_is_not_sharded_and_other_matrices_have_a_reason():
    derived = derive_plan(TwoPairs(), softmaxed())
    assert not any("multihead" in str(rule.style) for rule in derived.plan.rules)
    assert {name for name in derived.whole if not name.startswith("tower")} == {"layers.0.mix", "layers.1.mix"}
    assert "_trilinear" in derived.whole["layers.0.mix"]


def test_nothing_that_is_wrong_is_handed_over(monkeypatch):
    """If every draft is wrong, there is no plan."""
    monkeypatch.setitem(operations.RULES, "_softmax", operations._same)
    model = Softmaxed()
    model.c, model.d = nn.Linear(8, 8), nn.Identity()
    with refused(ModelError, "nothing-to-shard", "Softmaxed", "the proof failed"):
        derive_plan(model, softmaxed())


def test_a_missing_check_of_full_activations(monkeypatch):
    """The gradient of what is read beside shards is a part of it on each rank: outputs are equal, gradients are not."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x) * self.gate(x))

    monkeypatch.setattr(FactorAnalysis, "_read_beside", lambda self, candidate: "")
    monkeypatch.setattr(derive, "MAX_ROUNDS", 1)
    with refused(ModelError, "nothing-to-shard"):
        derive_plan(Gate(), softmaxed())


def test_a_gradient_that_is_partial_and_not_said_to_be(monkeypatch):
    monkeypatch.setattr(FactorAnalysis, "partial_of", lambda self, factors, columns: set())

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.down(self.up(x) * self.scale)

    with refused(ModelError, "nothing-to-shard"):
        derive_plan(Scaled(), softmaxed())


def test_chunks_that_are_taken_for_one(monkeypatch):
    monkeypatch.setattr(Drafting, "_units", lambda self, candidate, place, has_units: "")
    derived = derive_plan(models.TinyGpt(), models.ids())
    rules = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    assert rules["transformer.h.*.mlp.up"] == "colwise" and not any("c_attn" in pattern for pattern in rules)
    assert derived.whole["transformer.h.0.attn.c_attn"] == "the proof failed with it sharded"
    assert derived.whole["transformer.h.0.attn.c_proj"] == "the proof failed with transformer.h.0.attn.c_attn sharded"


class WithoutImageTokens(models.TinyGpt):
    """Rules tokens out by the smallest number, as models do whose texts have tokens of images."""

    def forward(self, ids):
        logits = super().forward(ids)
        logits[..., 3:] = torch.finfo(logits.dtype).min
        return SimpleNamespace(logits=logits)


def test_targets_are_tokens_that_the_model_does_not_rule_out():
    model, inputs = WithoutImageTokens(), models.ids()
    model.config = SimpleNamespace(vocab_size=model(**inputs).logits.shape[-1])
    source = provable(source_of(model), model, inputs)
    assert int(source.extras["inputs"](2, 11)["targets"].max()) <= 2
