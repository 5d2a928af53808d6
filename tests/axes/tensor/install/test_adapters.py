"""Models with adapters of PEFT, planned as threads in one process, equal the unsharded ones in every value and
gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_module
from parallelize.axes.zero.buckets import to_local
from parallelize.base.errors import ParallelizeError, PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from tests.axes.tensor.install.adapted_models import adapted_model, move
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run, worst
from tests.support.threads import run_ranks

pytest.importorskip("peft")

DATA = [tiny_batch(67, seed=1), tiny_batch(67, seed=2)]
BOTH = {"sequence_parallel": True, "loss_parallel": True}
KINDS = ["some layers", "embedding", "copies", "every bias", "norms", "blocks"]  # others are rows of the matrix


def check(family: str, kind: str, tp: int, dtype: torch.dtype = torch.float64, **options) -> None:
    model = adapted_model(family, kind, dtype)
    expected = reference_run(model, DATA)
    assert len(expected["grads"]) < len(list(model.parameters()))  # the base is frozen
    models = [copy.deepcopy(model) for _ in range(tp)]
    for actual in run_ranks(tp, lambda rank: planned_run(models[rank], tp, DATA, **options)):
        compare(actual, expected, dtype)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("options", [{}, BOTH], ids=["tensor", "sequence+loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, options):
    check("llama", kind, 2, **options)


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "family", ["gpt2", "phi3", "gemma2", "qwen3", "opt", "bert", "gpt_neox", "mistral", "qwen2", "olmo2"]
)
def test_families(family, tp):
    check(family, "lora", tp, **BOTH)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(
    "options", [{}, BOTH, {"ep": 2}, {"ep": 2, **BOTH}], ids=["tp", "tp sequence", "ep", "ep sequence"]
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts(family, options):
    check(family, "experts", 2, **options)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("options", [{}, BOTH, {"ep": 2, **BOTH}], ids=["tensor", "sequence+loss", "ep"])
@pytest.mark.parametrize("case", ["mixtral routers", "deepseek_v3 lora"])
def test_routers(case, options):
    """PEFT takes the routers and experts of deepseek_v3 for linears."""
    check(*case.split(), 2, **options)


def test_experts_over_both():
    check("qwen3_moe", "experts", 4, ep=2, etp=2, **BOTH)


def relative_errors(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[float]:
    """The relative error of each tensor in the 2-norm, in order of size."""
    return sorted(float((actual[name].double() - b).norm() / b.norm()) for name, b in exact.items())


@pytest.mark.sweep
def test_float32_is_as_near_to_float64_as_the_unsharded_model():
    """Gradients of adapters are small differences: the unsharded model's own are off by up to 1e-5. 8 ranks share 4
    heads."""
    model, exact = (adapted_model("llama", "lora", dtype) for dtype in (torch.float32, torch.float64))
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    unsharded, expected = reference_run(model, DATA), reference_run(exact, DATA)
    models = [copy.deepcopy(model) for _ in range(8)]
    planned = run_ranks(8, lambda rank: planned_run(models[rank], 8, DATA, sequence_parallel=True))[0]
    for key in ("grads", "grads twice", "weights"):
        ours, theirs = (relative_errors(run[key], expected[key]) for run in (planned, unsharded))
        for quantile in (0.25, 0.5, 0.75):
            at = int(quantile * len(ours))
            assert ours[at] <= 1.25 * theirs[at], (key, quantile)
        assert ours[-1] <= 4 * theirs[-1], key  # one tensor, which is rounded in another order


# -- what PEFT offers besides training ---------------------------------------------------------------------------------


def logits(model) -> torch.Tensor:
    return model(input_ids=DATA[0][0], use_cache=False).logits


def disabled(model):
    with model.disable_adapter():
        return logits(model)


def merged(model):
    model.merge_adapter()
    return logits(model)


def merged_and_not(model):
    model.merge_adapter()
    model.unmerge_adapter()
    return logits(model)


def merged_for_good(model):
    return logits(model.merge_and_unload())


def unloaded(model):
    return logits(model.unload())


@pytest.mark.parametrize("ep", [4])
def test_a_rank_stores_the_adapters_of_its_experts(ep):
    """Of six experts; on four ranks some have two, and the others are padded to as many."""
    models = [adapted_model("mixtral", "experts") for _ in range(ep)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=ep), ep=ep)
        named = models[rank].named_parameters()
        return {name: to_local(p).numel() for name, p in named if ".experts." in name and "lora" in name}

    full = {name: p.numel() for name, p in adapted_model("mixtral", "experts").named_parameters()}
    for stored in run_ranks(ep, body):
        assert stored and all(count == full[name] // 6 * -(-6 // ep) for name, count in stored.items())


@pytest.mark.sweep
def test_merging_adapters_of_whole_experts_for_good():
    model = adapted_model("mixtral", "experts").eval()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), ep=2)
        with torch.no_grad():
            return merged_for_good(models[rank])

    with torch.no_grad():
        expected = merged_for_good(model)
    for actual in run_ranks(2, body):
        assert worst({"logits": actual}, {"logits": expected})[0] < 1e-12


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("use", [disabled, merged, merged_and_not, merged_for_good, unloaded])
def test_merging_and_disabling(use):
    """LoRA's, on every axis: tests/matrix/."""
    model = adapted_model("llama", "dora").eval()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=use is merged_for_good)
        with torch.no_grad():
            return use(models[rank])

    with torch.no_grad():
        expected = use(model)
    for actual in run_ranks(2, body):
        assert worst({"logits": actual}, {"logits": expected})[0] < 1e-12


# -- what no plan serves -----------------------------------------------------------------------------------------------


def refused(model, **options) -> str:
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        with pytest.raises(ParallelizeError) as error:
            parallelize_module(models[rank], build_mesh("cpu", tp=2), **options)
        return error.value

    return run_ranks(2, body)[0]


def test_other_kinds_of_adapters_are_refused_by_name():
    import peft

    model = peft.get_peft_model(tiny_model("llama"), peft.LoHaConfig(target_modules=["q_proj"], r=2))
    error = refused(model)
    assert "unplanned-adapter" in error.slugs and "hada_w1_a" in str(error) and "loha" in str(error)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["tensor", "sequence"])
def test_learned_prompts(options):
    import peft

    prompts = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    model = peft.get_peft_model(tiny_model("llama", torch.float64), prompts).double()
    models = [copy.deepcopy(model) for _ in range(2)]
    ids, labels = DATA[0]

    def gradients(model, of) -> dict[str, torch.Tensor]:
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -ids.shape[1] :]
        torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten()).backward()
        return of(model)

    def body(rank):
        return gradients(parallelize_module(models[rank], build_mesh("cpu", tp=2), **options), full_gradients)

    expected = gradients(model, lambda model: {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for actual in run_ranks(2, body):
        assert worst(actual, expected)[0] < 1e-12


def test_parts_that_are_no_plain_linears_are_refused():
    import peft

    ends = peft.LoraConfig(r=2, target_modules=["embed_tokens"], use_dora=True)
    assert "DoraEmbeddingVariant" in str(refused(peft.get_peft_model(tiny_model("llama"), ends)))
    blocks = peft.LoraConfig(
        r=4, target_modules=["o_proj"], use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["o_proj"], nblocks=2)
    )
    assert "BlockDiagonal" in str(refused(peft.get_peft_model(tiny_model("llama"), blocks)))
    bare = peft.LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"])
    assert "parameter weight" in str(refused(peft.get_peft_model(tiny_model("llama"), bare)))
    latents = peft.LoraConfig(r=2, target_modules=[], target_parameters=["q_a_proj.weight"])
    assert "parameter weight" in str(refused(peft.get_peft_model(tiny_model("deepseek_v3"), latents)))


def test_what_an_axis_would_divide_is_refused():
    import peft

    tokens = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5])
    model = peft.get_peft_model(tiny_model("llama"), tokens)
    with pytest.raises(PlanError, match="trainable_token_indices") as error:
        resolve(None, describe(model), MeshSpec(tp=2))
    assert error.value.slugs == ("unplanned-adapter",)


def test_an_adapter_on_a_head_whose_logits_are_deferred_is_refused():
    error = refused(adapted_model("llama", "embedding"), fuse_loss=True)
    assert "unplanned-adapter" in error.slugs and "lm_head" in str(error)


def test_a_bias_that_trains_beside_a_scaled_row_linear_is_refused():
    model = adapted_model("llama", "ia3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("o_proj.base_layer.bias"))
    assert "unplanned-adapter" in refused(model).slugs


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, dtype=torch.float64))

    def forward(self, x):
        return F.linear(x, self.weight).softmax(-1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = Gate(), nn.Linear(6, 8).double()
        self.down = nn.Linear(8, 5).double()

    def forward(self, x):
        return self.gate(x) * self.down(self.up(x).relu())


def test_a_matrix_beside_no_other_parameter_is_changed_in_its_forward():
    """The forward of a module with one parameter and no conversions asks for the weight alone."""
    import peft

    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules=["up"], target_parameters=["gate.weight"])
    model = move(peft.get_peft_model(Gated(), adapters))
    models = [copy.deepcopy(model) for _ in range(2)]
    x = torch.randn(3, 6, dtype=torch.float64)
    plan = parse_plan(
        "schema_version: 1\ntensor_parallel: {gate: replicate(gradient=full), up: colwise, down: rowwise}"
    )

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), plan)
        planned(x).square().sum().backward()
        return full_gradients(planned)

    results = run_ranks(2, body)
    model(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for actual in results:
        assert worst(actual, expected)[0] < 1e-12
