"""Whole experts over `ep` within `tp`: the shipped plans equal the unsharded model. `tests/training` has those folded
over data axes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from parallelize import (
    MeshError,
    ModelError,
    PlanError,
    balanced_routing,
    build_mesh,
    full_gradients,
    generate,
    parallelize_model,
    parallelize_module,
    routing_load,
)
from parallelize.axes.tensor.experts import expert_parallel
from parallelize.axes.tensor.experts.routing_load import EXPERT, RANK, ExpertLoad
from parallelize.base.mesh import MeshSpec
from parallelize.ops.experts.routes import routes_of
from parallelize.ops.replay_cache import in_recompute
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from tests.axes.tensor.experts.test_expert_tensor_parallel import MODES, PLAN, Mixture, check, gradients
from tests.support.models import MIXTURES, tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks

HYBRIDS = ("qwen3_next", "qwen3_5_moe_text", "jamba", "lfm2_moe", "minimax", "nemotron_h", "granitemoehybrid")


@pytest.mark.variants(every=17)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe", "dbrx", "jetmoe", "llama4_text"),
        *HYBRIDS,
        "gemma4_text",
    ],
)
def test_families(family, tp, ep, mode):
    """Six experts, of which four ranks have one or two. With ep 2 on four ranks, two ranks have each expert."""
    check(tiny_model(family, torch.float64), {**MODES[mode], "ep": ep}, tp, torch.float64)


@pytest.mark.sweep
@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", MIXTURES)
def test_float32_is_as_close_to_float64_as_the_stock_model_is(family):
    """To 5e-6, except for families whose stock float32 is further away (Jamba, Gemma 4, Qwen 3.5): to twice its
    distance."""
    model, wide, (ids, labels) = tiny_model(family), tiny_model(family, torch.float64), tiny_batch()
    wide.load_state_dict(model.state_dict())
    if family == "phimoe":  # in training its router draws
        model, wide = model.eval(), wide.eval()
    exact, _ = gradients(wide, ids, labels, tp=1)
    stock, results = gradients(model, ids, labels, ep=2, sequence_parallel=True)
    distance = worst({name: value.double() for name, value in stock.items()}, exact)[0]
    for actual in results:
        assert worst({name: value.double() for name, value in actual.items()}, exact)[0] <= max(5e-6, 2 * distance)


@pytest.mark.sweep
@pytest.mark.variants(every=13)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "sizes"), [(2, {"etp": 2}), (4, {"ep": 2, "etp": 2}), (4, {"etp": 2})], ids=str)
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen2_moe",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "nemotron_h",
        "jamba",
        "gemma4_text",
        "jetmoe",
        "llama4_text",
    ],
)
def test_families_with_experts_that_are_split_too(family, tp, sizes, mode):
    """With biases, interleaved, transposed and without a gate. The last sizes leave two copies of each expert."""
    check(tiny_model(family, torch.float64), {**MODES[mode], **sizes}, tp, torch.float64)


@pytest.mark.parametrize(("family", "options"), [("dbrx", {}), ("jetmoe", {"sequence_parallel": True, "ep": 2})])
def test_experts_with_weights_in_modules_inside(family, options):
    check(tiny_model(family, torch.float64), options, 2, torch.float64)


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ep": 3, "etp": 2}, r"ep is 3, etp 2, .*\s+fix  ep x etp = 1, 2, 4: with etp=2, ep=1, 2"),
        ({"etp": 3}, r"ep is 1, etp 3, .*\s+fix  ep x etp = 1, 2, 4$"),
    ],
)
def test_an_etp_that_does_not_fold_is_refused_with_what_does(options, text):
    problems = Options(**options).complete().check_on(MeshSpec(dp=2, tp=2))
    assert [problem.slug for problem in problems] == ["bad-ep"]
    with pytest.raises(ModelError, match=text):
        raise ModelError(*problems)


@pytest.mark.parametrize(
    ("family", "sizes", "options", "text"),
    [
        ("mixtral", {}, {"ep": 4, "etp": 2}, "6 experts of .*each split over etp 2, are not divisible by ep 4"),
        (
            "mixtral",
            {"intermediate_size": 37},
            {"etp": 2},
            "dim 1 of .*gate_up_proj is 74, which etp 2 does not divide",
        ),
        ("llama", {}, {"etp": 2}, "etp is 2, and no rule is `experts`"),
        ("dbrx", {}, {"etp": 2}, "experts-not-splittable: .* rows of one expert after another"),
    ],
)
def test_experts_that_cannot_be_split_over_etp_are_refused(family, sizes, options, text):
    from parallelize.plan.choose import choose_plan

    model = tiny_model(family, **sizes)
    with pytest.raises(PlanError, match=text):
        resolve(choose_plan(model)[0], describe(model), MeshSpec(tp=8), Options(**options))


def test_other_parameters_of_experts_that_are_split_are_refused():
    with pytest.raises(PlanError, match=r"experts-not-splittable: experts has parameters that .* do not have: scale"):
        resolve(PLAN, describe(Mixture(extra=True)), MeshSpec(tp=2), Options(etp=2))


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
            ModelError,
            match=r"bad-choice: model.layers.1.mlp.experts got .* \[0, 6\)[\s\S]*rank 1 *1 choices, such as 17",
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


def test_a_plan_that_names_no_experts_gets_those_of_the_plan_over_ep():
    from parallelize.plan.hf_plans import words_of

    class Config:
        base_model_tp_plan = {"layers.*.o_proj": "rowwise"}
        base_model_ep_plan = {"layers.*.mlp.experts": "ep_dispatch_experts", "layers.*.mlp.experts.w": "grouped_gemm"}

    assert words_of(Config) == {**Config.base_model_tp_plan, **Config.base_model_ep_plan}
    Config.base_model_tp_plan = {"layers.*.mlp.experts": "moe_tp_experts"}
    assert words_of(Config) == Config.base_model_tp_plan
    Config.base_model_tp_plan = None
    Config.base_model_ep_plan["layers.*.mlp.gate_proj"] = "colwise"  # of ranks that have whole experts
    assert "layers.*.mlp.gate_proj" not in words_of(Config)


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


@pytest.mark.parametrize("options", [{"ep": 2}, {"ep": 2, "sequence_parallel": True}, {}], ids=str)
def test_the_load_of_experts_over_ranks(options):
    """The ratios are those of the unsharded model, whose ranks would have three experts each. Shards of nine tokens are
    padded."""
    model = tiny_model("mixtral", torch.float64)
    ids, _ = tiny_batch(batch=3, length=9)
    with routing_load(model) as alone:
        model(input_ids=ids)
    counts = alone.counts()
    assert [int(count.sum()) for count in counts.values()] == [ids.numel() * 2] * len(model.model.layers)
    by_expert = max(float(count.max() / count.double().mean()) for count in counts.values())
    by_rank = max(float(count.view(2, 3).sum(1).max() / (count.sum() / 2)) for count in counts.values())
    models = [tiny_model("mixtral", torch.float64) for _ in range(2)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **options)
        with routing_load(models[rank]) as load:
            models[rank](input_ids=ids)
        return load.imbalance()

    for imbalance in run_ranks(2, body):
        assert imbalance["expert"] == pytest.approx(by_expert)
        assert imbalance["rank"] == pytest.approx(by_rank if "ep" in options else 1.0)


def test_the_load_of_a_step_is_that_of_the_worst_layer_of_all_stages():
    """Over microbatches and stages; every rank has the same numbers. A dense model has none."""
    model, (ids, labels) = tiny_model("mixtral", num_hidden_layers=4), tiny_batch(batch=4, length=8)
    with routing_load(model) as alone:
        model(input_ids=ids)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", pp=2), num_microbatches=2)
        load = ExpertLoad(models[rank])
        with load.counting():
            parallel.step(ids, targets=labels)
        return load.scalars()

    expected = {EXPERT: alone.imbalance()["expert"], RANK: 1.0}
    assert run_ranks(2, body) == [pytest.approx(expected)] * 2
    dense = ExpertLoad(tiny_model("llama"))
    with dense.counting():
        assert dense.scalars() == {}


def test_a_recomputed_unit_routes_once(monkeypatch):
    """Its replay takes the routes of the forward, even where the router then chooses others."""
    model = tiny_model("mixtral", torch.float64)
    calls = []

    def counted(choices, *args):
        calls.append(len(choices))
        return routes_of(choices, *args)

    monkeypatch.setattr(expert_parallel, "routes_of", counted)
    models = [copy.deepcopy(model) for _ in range(2)]
    ids, labels = tiny_batch(length=8)

    def flip_in_replays(module, inputs, output):
        logits, weights, choices = output
        return (logits, weights, choices.flip(0)) if in_recompute() else output

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2), ep=2, recompute="full")
        for layer in models[rank].model.layers:
            layer.mlp.gate.register_forward_hook(flip_in_replays)
        parallel.step(ids, targets=labels)
        return full_gradients(models[rank])["model.layers.0.mlp.experts.down_proj"]

    logits = model(input_ids=ids).logits
    loss_of(logits, labels).backward()
    expected = model.model.layers[0].mlp.experts.down_proj.grad
    for grad in run_ranks(2, body):
        assert float((grad - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert len(calls) == 2 * len(model.model.layers)


@pytest.mark.parametrize("ep", [2, 4])
def test_generation_with_whole_experts(ep):
    """Within tp all ranks have the same sequences. Over data ranks one might end before others, which would wait:
    refused."""
    model = tiny_model("mixtral").eval()
    ids, _ = tiny_batch()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    models = [copy.deepcopy(model) for _ in range(4)]

    def body(rank):
        mesh = build_mesh("cpu", dp=2, tp=2)
        parallelize_module(models[rank], mesh, ep=ep, own_reduction=True)
        if ep == 4:
            for call in (models[rank].generate, partial(generate, models[rank])):
                with pytest.raises(ModelError, match="generate-over-ep"):
                    call(ids, max_new_tokens=4)
            return expected
        return models[rank].generate(ids, max_new_tokens=4, do_sample=False)

    for actual in run_ranks(4, body):
        assert torch.equal(actual, expected)


def test_autocast():
    """Of a batch of one token, whose experts are on one of the ranks: the other has no pairs, and the same dtypes."""
    model = tiny_model("mixtral")
    ids, labels = torch.tensor([[5]]), torch.tensor([[7]])
    models = [copy.deepcopy(model) for _ in range(2)]

    def gradient(net):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(net(input_ids=ids).logits.float(), labels).backward()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), ep=2)
        gradient(models[rank])
        return full_gradients(models[rank])

    results = run_ranks(2, body)
    gradient(model)
    for actual in results:
        error, name = worst(actual, {name: p.grad for name, p in model.named_parameters()})
        assert error <= 0.05, name
