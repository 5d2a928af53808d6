"""Prompt, P- and prefix tuning over pipeline stages: losses, gradients and files are those of one process."""

from __future__ import annotations

import copy
from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, next_tokens, parallelize_model, save_adapter
from parallelize.base.errors import PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS = torch.cat([tiny_batch(67, seed=seed)[0] for seed in range(4)])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
STEPS = 3
MLP = {"num_virtual_tokens": 4, "encoder_hidden_size": 16}
KINDS = {
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=3),
    "P-tuning": partial(peft.PromptEncoderConfig, **MLP),
    "P-tuning with an LSTM": partial(peft.PromptEncoderConfig, **MLP, encoder_reparameterization_type="LSTM"),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
    "projected prefix": partial(peft.PrefixTuningConfig, **MLP, prefix_projection=True),
}
SPLIT = {"num_microbatches": 4, "schedule": "zbv"}
TWICE = {"num_microbatches": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2}
HALVES = {**TWICE, "schedule": "interleaved_zero_bubble"}
SP = {"sequence_parallel": True}
CASES = {
    "prefix-split-backward": ("llama", "prefix", {"pp": 2}, SPLIT),
    "prompt": ("llama", "prompt", {"pp": 2}, {}),
    "prompt-split-backward": ("llama", "prompt", {"pp": 2}, SPLIT),
    "P-tuning-interleaved": ("llama", "P-tuning", {"pp": 2}, TWICE),
    "LSTM-split-backward": ("llama", "P-tuning with an LSTM", {"pp": 2}, SPLIT),
    "prefix-interleaved": ("llama", "prefix", {"pp": 2}, TWICE),
    "projected-interleaved-split-backward": ("llama", "projected prefix", {"pp": 2}, HALVES),
    "projected-4-stages": ("llama", "projected prefix", {"pp": 4}, {"num_microbatches": 4}),
    "projected-tp": ("llama", "projected prefix", {"pp": 2, "tp": 2}, {**SPLIT, **SP}),
    "prompt-tp": ("llama", "prompt", {"pp": 2, "tp": 2}, {**SP, "loss_parallel": True}),
    "prefix-zero2": ("llama", "prefix", {"pp": 2, "dp": 2}, {"zero": 2}),
    "P-tuning-zero3": ("llama", "P-tuning", {"pp": 2, "dp": 2}, {"zero": 3}),
    "prompt-recompute": ("llama", "prompt", {"pp": 2}, {"recompute": "full"}),
    **{f"{family}-{kind}": (family, kind, {"pp": 2}, {}) for family in ("gpt2", "qwen2", "phi3") for kind in KINDS},
    **{f"{family}-prefix": (family, "prefix", {"pp": 2}, {}) for family in ("gemma2", "mixtral")},
}
SOME = {"prefix-split-backward", "prompt"}


def prompted(family: str, kind: str, layers: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tiny_model(family, torch.float64, num_hidden_layers=layers)
    model = peft.get_peft_model(model, KINDS[kind](task_type="CAUSAL_LM")).double()
    for parameter in model.prompt_encoder.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def loss_of(model, labels: torch.Tensor) -> torch.Tensor:
    """As PEFT computes it, whose model shifts labels behind those of the prompts, but in float64."""
    logits = model(**INPUTS).logits
    count = logits.shape[1] - labels.shape[1]
    labels = torch.cat([labels.new_full((len(labels), count), -100), labels], 1)
    return F.cross_entropy(logits.flatten(0, 1), next_tokens(labels).flatten())


def unsharded(model) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(model, IDS))
        losses[-1].backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return torch.stack(losses).detach(), gradients


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SOME else pytest.mark.sweep) for c in CASES])
def test_losses_and_gradients_are_those_of_one_process(case):
    family, kind, axes, options = CASES[case]
    model = prompted(family, kind)
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(models[rank], mesh, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        rows = len(IDS) // axes.get("dp", 1)
        first = rows * (mesh.get_local_rank("dp") if "dp" in axes else 0)
        inputs = {name: value[first : first + rows] for name, value in INPUTS.items()}
        losses, gradients = [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(parallel.step(**inputs, labels=inputs["input_ids"]))
            named = [(n, p) for n, p in parallel.module.named_parameters() if p.grad is not None]
            gradients.append({n: full_value(parallel.module, n, p.grad).clone() for n, p in named})
            optimizer.step()
        return torch.stack(losses), gradients

    results = run_ranks(len(models), body)
    losses, gradients = unsharded(model)
    for actual, parts in results:
        assert (actual - losses).abs().max() < 1e-12
        for part, full in zip(parts, gradients, strict=True):
            assert not part or worst(part, {name: full[name] for name in part})[0] < 1e-12
    assert {name for _, parts in results for name in parts[0]} == gradients[0].keys()


def test_targets_are_those_of_tokens():
    """The last prompt predicts the first token where labels are given, and no prompt where targets are."""
    model = prompted("llama", "prompt", 2)
    model_copy, targets = copy.deepcopy(model), next_tokens(IDS)
    with torch.no_grad():
        logits = model(**INPUTS).logits[:, -IDS.shape[1] :]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def body(rank):
        parallel = parallelize_model(model_copy, build_mesh("cpu", dp=1))
        return parallel.evaluate(**INPUTS, targets=targets), parallel.evaluate(**INPUTS, labels=IDS)

    by_targets, by_labels = run_ranks(1, body)[0]
    assert abs(by_targets - expected) < 1e-12
    assert abs(by_labels - loss_of(model, IDS).detach()) < 1e-12


def test_another_adapter_may_be_chosen_between_steps():
    model = prompted("llama", "prefix", 2)
    model.add_adapter("second", KINDS["prefix"](task_type="CAUSAL_LM"))
    models = [copy.deepcopy(model.double()) for _ in range(2)]

    def losses(model, loss) -> torch.Tensor:
        values = []
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            values.append(loss().detach())
        return torch.stack(values)

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", pp=2))
        return losses(parallel.module, lambda: parallel.step(**INPUTS, labels=IDS))

    expected = losses(model, lambda: loss_of(model, IDS))
    assert all((actual - expected).abs().max() < 1e-12 for actual in run_ranks(2, body))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_peft_and_load(kind, tmp_path):
    model = prompted("llama", kind)
    models = [copy.deepcopy(model) for _ in range(2)]
    model.save_pretrained(tmp_path / "stock")
    bases = [copy.deepcopy(model.get_base_model()) for _ in range(2)]
    frozen = [peft.PeftModel.from_pretrained(base, tmp_path / "stock") for base in bases]
    with torch.no_grad():
        expected = copy.deepcopy(frozen[0])(**INPUTS).logits

    def body(rank):
        save_adapter(parallelize_model(models[rank], build_mesh("cpu", pp=2)), tmp_path / "here")
        loaded = parallelize_model(frozen[rank], build_mesh("cpu", pp=2), **TWICE)
        return torch.cat([output.logits for output in loaded.forward(**INPUTS)] or [expected])

    assert all((logits - expected).abs().max() < 1e-12 for logits in run_ranks(2, body))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_stages_that_are_assigned_have_the_prompts_too():
    layers = [f"base_model.model.layers.{number}" for number in range(2)]
    model = prompted("llama", "prefix", 2)
    stages = [["base_model.model.embed_tokens", layers[0]], [layers[1], "base_model.model.norm", "base_model.lm_head"]]
    resolved = resolve(None, describe(model), MeshSpec(pp=2), assignment=stages)
    assert resolved.stages is not None
    assert resolved.stages.units_of(0)[0] == "prompt_encoder.default"
    assert resolved.stages.stage_of("word_embeddings.weight") == 0  # PEFT's other name of the embedding
    assert resolved.stage_of("base_model.lm_head.weight") == 1


def test_other_kinds_are_refused_over_stages():
    config = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2)
    model = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(PlanError, match="MultitaskPromptEmbedding") as error:
        resolve(None, describe(model), MeshSpec(pp=2))
    assert error.value.slugs == ("unplanned-adapter",)
