"""Prefix tuning over `tp`: each rank takes the keys and values of its heads, in either order of calls."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, full_gradients, parallelize_model, parallelize_module, save_adapter
from parallelize.base.errors import ModelError
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS, LABELS = tiny_batch(67)


def prefixes(**options):
    return peft.PrefixTuningConfig(**{"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, **options})


def with_prefixes(family: str, sizes: dict, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(family, torch.float64, **sizes), prefixes(**options)).double()
    for parameter in model.prompt_encoder.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def values(model, of) -> dict[str, torch.Tensor]:
    """Logits, and gradients of the prompts."""
    logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
    return {**of(model), "logits": logits.detach()}


def plain_gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize(
    ("family", "tp", "sizes"),
    [
        ("llama", 4, {"num_key_value_heads": 2}),
        ("llama", 2, {}),
        ("gpt2", 2, {}),
        ("phi3", 4, {}),
        ("qwen2", 2, {}),
    ],
)
def test_values_are_those_without_a_mesh(family, tp, sizes, projection, sp):
    model = with_prefixes(family, sizes, prefix_projection=projection, encoder_hidden_size=12)
    models = [copy.deepcopy(model) for _ in range(tp)]
    expected = values(model, plain_gradients)
    assert len(expected) == (6 if projection else 2)

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=tp), sequence_parallel=sp)
        return values(planned, full_gradients)

    assert max(worst(actual, expected)[0] for actual in run_ranks(tp, body)) < 1e-12


def test_prefixes_after_the_plan_are_those_of_the_first_rank():
    base, model = tiny_model("llama", torch.float64), with_prefixes("llama", {})
    state, expected = copy.deepcopy(model.prompt_encoder.state_dict()), values(model, plain_gradients)

    def body(rank):
        planned = peft.get_peft_model(parallelize_module(copy.deepcopy(base), build_mesh("cpu", tp=2)), prefixes())
        planned.double().prompt_encoder.load_state_dict({n: x + rank for n, x in state.items()})
        return values(planned, plain_gradients)

    assert max(worst(actual, expected)[0] for actual in run_ranks(2, body)) < 1e-12


@pytest.mark.sweep
def test_generation_files_and_loaded_prefixes(tmp_path):
    model, prompt = with_prefixes("llama", {}).eval(), IDS[:1, :5]
    models = [copy.deepcopy(model) for _ in range(2)]
    model.save_pretrained(tmp_path / "stock")
    loaded = [
        peft.PeftModel.from_pretrained(copy.deepcopy(models[0].get_base_model()), tmp_path / "stock") for _ in "ab"
    ]
    expected = loaded[0](input_ids=IDS).logits.detach()

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        save_adapter(planned, tmp_path / "here")
        tokens = planned.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
        frozen = parallelize_module(copy.deepcopy(loaded[rank]), build_mesh("cpu", tp=2))
        return tokens, (frozen(input_ids=IDS).logits - expected).abs().max()

    tokens = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    assert all(torch.equal(actual, tokens) and error < 1e-12 for actual, error in run_ranks(2, body))
    stock, here = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("stock", "here"))
    assert stock == here


def test_prompts_after_data_axes_are_refused():
    base = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=1)
        with refused(ModelError, "added-parameter", "nothing sums over data ranks"):
            peft.get_peft_model(parallel.module, prefixes())(input_ids=IDS)

    run_ranks(2, body)


PLAN = """
schema_version: 1
model_type: llama
tensor_parallel:
  model.layers.*.mlp: gather
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  model.**: replicate
  lm_head: replicate
"""


def test_prefixes_of_heads_that_no_plan_divides_are_refused(tmp_path):
    model = with_prefixes("llama", {})
    (tmp_path / "plan.yaml").write_text(PLAN)

    def body(rank):
        with refused(ModelError, "unplanned-adapter", "not which of them a rank has"):
            parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), tmp_path / "plan.yaml")

    run_ranks(2, body)
