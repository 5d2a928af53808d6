"""Experts of a mixture over `tp`: shipped plans of every family equal the unsharded model, and what cannot be right is
refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from parallelize import ModelError, PlanError, build_mesh, full_gradients, parallelize_module
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import choose_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from tests.support.models import FAMILIES, MIXTURES, tiny_batch, tiny_model
from tests.support.parity import compare, loss_of, planned_run, reference_run, worst
from tests.support.threads import run_ranks

TRAINED = [family for family in MIXTURES if family not in (*FAMILIES, "phimoe")]
MODES = {"tensor": {}, "sequence": {"sequence_parallel": True, "loss_parallel": True}}


def check(model, mode, tp, dtype):
    batches = [tiny_batch(seed=1), tiny_batch(seed=2)]
    expected = reference_run(model, batches)
    models = [copy.deepcopy(model) for _ in range(tp)]
    for actual in run_ranks(tp, lambda rank: planned_run(models[rank], tp, batches, **mode)):
        compare(actual, expected, dtype)


@pytest.mark.variants(every=13)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", TRAINED)
def test_every_family(family, tp, mode):
    check(tiny_model(family, torch.float64), MODES[mode], tp, torch.float64)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_every_implementation_of_the_stock_experts(mode, implementation, ep):
    model = tiny_model("mixtral")
    model.set_experts_implementation(implementation)
    check(model, {**MODES[mode], "ep": ep}, 2, torch.float32)


def test_an_odd_width_of_the_experts():
    check(tiny_model("gpt_oss", torch.float64, intermediate_size=37), MODES["sequence"], 4, torch.float64)


@pytest.mark.variants(every=5)
@pytest.mark.parametrize(
    ("family", "sizes", "tp", "options"),
    [
        ("mixtral", {"intermediate_size": 40}, 4, {}),
        ("mixtral", {"intermediate_size": 36}, 4, {"ep": 2, "etp": 2, "sequence_parallel": True}),
        ("gpt_oss", {"intermediate_size": 36}, 2, {}),
        ("nemotron_h", {"moe_intermediate_size": 36}, 2, {}),
    ],
)
def test_a_width_per_rank_that_grouped_matmuls_refuse(family, sizes, tp, options):
    """The rows of the ranks' parts are no multiple of 16 bytes, those of the unsharded model are."""
    model = tiny_model(family, **sizes)
    model.set_experts_implementation("grouped_mm")
    check(model, options, tp, torch.float32)


@pytest.mark.sweep
def test_such_a_width_in_bfloat16():
    model = tiny_model("mixtral", intermediate_size=40).bfloat16()
    ids, labels = tiny_batch()
    expected, _ = gradients(model.float(), ids, labels, tp=1)
    model.bfloat16().set_experts_implementation("grouped_mm")
    for actual in gradients(model, ids, labels)[1]:
        assert worst({key: value.float() for key, value in actual.items()}, expected)[0] <= 0.05


def gradients(model, ids, labels, tp=2, **options):
    """(loss, gradients) of the unsharded model, and of each rank."""
    reference = copy.deepcopy(model)
    loss = loss_of(reference(input_ids=ids).logits, labels)
    loss.backward()
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=tp), **options)
        planned_loss = loss_of(models[rank](input_ids=ids).logits, labels)
        planned_loss.backward()
        return {"loss": planned_loss.detach(), **full_gradients(models[rank])}

    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **expected}, run_ranks(tp, body)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("favored", [False, True])
def test_experts_that_no_token_chose_get_zeros(favored, ep):
    """Two experts get every token where `favored`, else a batch of one token chooses two of six. With `ep` one rank
    gets none, or one rank sends none."""
    model = tiny_model("deepseek_v3", torch.float64)
    ids, labels = tiny_batch() if favored else (torch.tensor([[5]]), torch.tensor([[7]]))
    if favored:
        with torch.no_grad():
            model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    expected, results = gradients(model, ids, labels, ep=ep)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert (expected[name].flatten(1).abs().amax(1) == 0).sum() == 4
    for actual in results:
        assert worst(actual, expected)[0] <= 1e-12


def test_routers_that_draw_choose_the_same_experts_on_every_rank():
    """Also where ranks are seeded apart, and nothing was installed: here all ranks draw from one generator in turns."""
    for model in (tiny_model("phimoe", torch.float64), tiny_model("mixtral", torch.float64, router_jitter_noise=0.1)):
        (expected, first), second = gradients(model, *tiny_batch())[1], gradients(model.eval(), *tiny_batch())
        assert worst(first, expected)[0] <= 1e-12
        assert all(worst(actual, second[0])[0] <= 1e-12 for actual in second[1])


class Mixture(nn.Module):
    """Stacked experts beside a router, marked as `transformers` marks them."""

    def __init__(self, post_norm=False, extra=False):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), Experts(post_norm, extra)

    def forward(self, x):
        weights, choices = self.router(x).softmax(-1).topk(2)
        return self.experts(x, choices, weights)


class Experts(nn.Module):
    def __init__(self, post_norm=False, extra=False):
        super().__init__()
        self.is_transposed = self.has_bias = False
        self.has_gate = False
        self.has_post_expert_norm = post_norm
        self.up_proj = nn.Parameter(torch.randn(3, 6, 4, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 6, dtype=torch.float64))
        if extra:
            self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens, choices, weights):
        out = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up_proj, self.down_proj, strict=True)):
            weight = (weights * (choices == expert)).sum(-1, keepdim=True)
            out = out + weight * ((tokens @ up.T).relu() @ down.T)
        return out


PLAN = parse_plan("schema_version: 1\ntensor_parallel: {router: replicate, experts: experts}")


def test_a_users_own_experts_without_a_gate():
    torch.manual_seed(0)
    model, x = Mixture().double(), torch.randn(5, 4, dtype=torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]
    model(x).square().sum().backward()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), PLAN)
        models[rank](x).square().sum().backward()
        return full_gradients(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, {n: p.grad for n, p in model.named_parameters()})[0] <= 1e-12


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        (Mixture(post_norm=True), "experts-not-splittable"),
        (Mixture(extra=True), "experts-not-splittable"),
        (nn.ModuleDict({"router": nn.Linear(4, 3), "experts": nn.Linear(4, 4)}), "wrong-module-for-style"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(model, slug):
    with pytest.raises((PlanError, ModelError)) as error:
        resolve(PLAN, describe(model), MeshSpec(tp=2))
    assert error.value.slugs[0] == slug


@pytest.mark.parametrize("ep", [1, 2])
def test_parameters_of_a_module_inside_of_experts_are_refused(ep):
    model = Mixture()
    model.experts.norm = nn.LayerNorm(4)
    plan = replace(PLAN, on_unclaimed="replicate")
    with pytest.raises(PlanError, match="experts-not-divisible"):
        resolve(plan, describe(model), MeshSpec(tp=2), Options(ep=ep))
    model.experts.norm.requires_grad_(False)
    resolve(plan, describe(model), MeshSpec(tp=2), Options(ep=ep))


def test_experts_with_another_call_are_refused():
    class OneInput(Experts):
        def forward(self, tokens):
            return tokens

    model = Mixture()
    model.experts = OneInput()
    with pytest.raises(ModelError, match="wrong-experts-call"):
        run_ranks(2, lambda rank: parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), PLAN))


class DenseExperts(nn.Module):
    """Experts that get every token: [experts x tokens, hidden] in and out."""

    def __init__(self, key="down_proj"):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 4, 10))
        self.register_parameter(key, nn.Parameter(torch.randn(3, 5, 4)))

    def forward(self, tokens):
        return tokens


DENSE = parse_plan("schema_version: 1\ntensor_parallel: {experts: experts(tokens=all)}")


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("experts", [DenseExperts("other"), nn.Linear(4, 4)], ids=["other", "linear"])
def test_experts_that_get_every_token_and_cannot_be_split_are_refused(experts, ep):
    with pytest.raises((PlanError, ModelError)) as error:
        resolve(DENSE, describe(nn.ModuleDict({"experts": experts})), MeshSpec(tp=2), Options(ep=ep))
    assert error.value.slugs[0] == "experts-not-splittable"


def test_key_value_heads_that_a_layer_of_gemma_4_does_not_share_are_refused():
    """Its layers with global attention have two heads, of which four ranks would store halves."""
    model = tiny_model("gemma4_text", num_global_key_value_heads=2)
    with pytest.raises(PlanError, match="uneven-heads"):
        resolve(choose_plan(model)[0], describe(model), MeshSpec(tp=4))
    check(tiny_model("gemma4_text", torch.float64, num_global_key_value_heads=2), MODES["tensor"], 2, torch.float64)


def test_inputs_of_a_layer_of_its_own_are_right_and_refused_under_sequence_parallelism():
    """The model of Gemma 4 reads them by ids, so that `inputs_embeds` alone does not do."""
    model = tiny_model("gemma4_text", torch.float64, hidden_size_per_layer_input=4, vocab_size_per_layer_input=67)
    ids, labels = tiny_batch()
    expected, results = gradients(model, ids, labels)
    for actual in results:
        assert worst(actual, expected)[0] <= 1e-12
    with pytest.raises(PlanError, match="replicated-in-region"):
        gradients(model, ids, labels, sequence_parallel=True)
