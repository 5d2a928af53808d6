"""Whole experts over `ep` within `tp`: the shipped plans equal the unsharded model. `tests/training` has those folded over data axes."""

from __future__ import annotations

import pytest
import torch

from parallelize import MeshError, ModelError, PlanError, balanced_routing, build_mesh, parallelize_module
from parallelize.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks
from tests.tensor.test_split_experts import MODES, PLAN, Mixture, check


@pytest.mark.variants(every=13)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_families(family, tp, ep, mode):
    """Six experts, of which four ranks have one or two. With ep 2 on four ranks, two ranks have each expert."""
    check(tiny_model(family, torch.float64), {**MODES[mode], "ep": ep}, tp, torch.float64)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_every_implementation_of_the_stock_experts(mode, implementation):
    model = tiny_model("mixtral")
    model.set_experts_implementation(implementation)
    check(model, {**MODES[mode], "ep": 2}, 2, torch.float32)


def test_chunks_that_travel_beside_the_matmuls():
    check(tiny_model("mixtral", torch.float64), {**MODES["sequence"], "ep": 2, "overlap": "chunked"}, 2, torch.float64)


def test_other_parameters_of_the_experts():
    resolved = resolve(PLAN, describe(Mixture(extra=True)), MeshSpec(tp=2), Options(ep=2))
    assert resolved.parameters["experts.scale"].layout.dim == 0


@pytest.mark.parametrize(
    ("plan", "ep", "tp", "text"),
    [
        (PLAN, 4, 4, "bad-ep: 3 experts of experts leave none for some of 4 ranks"),
        (parse_plan("schema_version: 1\ntensor_parallel: {router: replicate, experts: replicate}"), 2, 2, "no rule is"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(plan, ep, tp, text):
    with pytest.raises(PlanError, match=text):
        resolve(plan, describe(Mixture()), MeshSpec(tp=tp), Options(ep=ep))


@pytest.mark.parametrize("ep", [3, 6])
def test_a_folding_that_is_impossible_is_refused_with_those_that_are_not(ep):
    model = tiny_model("mixtral")
    with pytest.raises(MeshError, match=rf"bad-ep: ep is {ep}, and experts .* over tp 4[\s\S]*ep=1, 2, 4"):
        run_ranks(4, lambda rank: parallelize_module(tiny_model("mixtral"), build_mesh("cpu", tp=4), ep=ep))
    assert not hasattr(model, "_applied")


def test_a_choice_that_does_not_exist_is_an_error_on_every_rank():
    """Of one rank's tokens; the others have none that is wrong."""
    models = [tiny_model("mixtral") for _ in range(2)]
    ids, _ = tiny_batch(length=8)

    def break_choices(module, inputs, output):
        logits, weights, choices = output
        choices[0, 0] = 17
        return logits, weights, choices

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        parallelize_module(models[rank], mesh, ep=2, sequence_parallel=True, check_replicated=False)
        if rank == 1:
            models[rank].model.layers[1].mlp.gate.register_forward_hook(break_choices)
        with pytest.raises(
            ModelError, match=r"bad-choice: model.layers.1.mlp.experts got .* \[0, 6\)[\s\S]*rank 1 *1 ch"
        ):
            models[rank](input_ids=ids)

    run_ranks(2, body)


def test_the_words_of_transformers_for_expert_parallelism():
    """Its rules for weights are covered by that of their module."""
    from parallelize.plan.hf_plans import read_words

    words = tiny_model("mixtral").config.base_model_ep_plan
    assert "grouped_gemm" in words.values()
    assert {pattern: str(style) for pattern, style in read_words(words, "Mixtral").items()} == {
        "layers.*.mlp.experts": "experts"
    }


def test_balanced_routing_gives_each_expert_as_many_tokens():
    model, counts = tiny_model("mixtral"), []
    experts = model.model.layers[0].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _, args: counts.append(args[1].flatten().bincount(minlength=6)))
    ids, _ = tiny_batch(batch=3, length=4)
    with balanced_routing(model):
        experts._forward_pre_hooks.move_to_end(handle.id)
        model(input_ids=ids)
    model(input_ids=ids)
    assert counts[0].tolist() == [4] * 6 and counts[1].tolist() != counts[0].tolist()
    with pytest.raises(ModelError, match="no-experts"), balanced_routing(tiny_model("llama")):
        pass
