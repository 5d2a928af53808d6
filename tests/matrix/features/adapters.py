"""Adapters of PEFT, before the plan and after it, and on a quantized base. Without PEFT there are no such rows."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from parallelize import dequantize, export_weights, quantize, save_adapter
from tests.matrix.feature import change, feature
from tests.matrix.features.state import ADAMW, first_step, go_on_elsewhere
from tests.matrix.sides import Side, seeded

if find_spec("peft"):  # before a plan, as adapters after it need
    import peft  # noqa: F401

OWN_LINEARS = ["query", "key", "value", "out", "up", "gate", "down"]
SCALED = {  # for IA3: outputs that are scaled, and linears whose inputs are
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "t5": (["k", "v", "wo"], ["wo"]),
    "qwen3_moe": (["k_proj", "v_proj"], []),
    "bamba": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "vit": (["fc1", "fc2"], ["fc2"]),
    "own": (["key", "value", "down"], ["down"]),
}
PROMPTS = {"causal", "stock"}


def _linears(model: nn.Module) -> Any:
    """Of a mixture those of its attention: its experts are no linears."""
    if hasattr(getattr(model, "config", None), "num_experts"):
        return ["q_proj", "k_proj", "v_proj", "o_proj"]
    return "all-linear" if hasattr(model, "config") else OWN_LINEARS


def _type_of(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", "own")


def lora(**options: Any) -> Callable[[nn.Module], nn.Module]:
    """Adds LoRA to a model."""

    def add(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        return _moved(get_peft_model(model, LoraConfig(**{"r": 3, "target_modules": _linears(model), **options})))

    return add


def ia3(model: nn.Module) -> nn.Module:
    from peft import IA3Config, get_peft_model

    targets, inputs = SCALED[_type_of(model)]
    return _moved(get_peft_model(model, IA3Config(target_modules=targets, feedforward_modules=inputs)))


def prompts(name: str) -> Callable[[nn.Module], nn.Module]:
    def add(model: nn.Module) -> nn.Module:
        import peft

        config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return _moved(peft.get_peft_model(model, config)).train()

    return add


def _moved(model: nn.Module) -> nn.Module:
    """Adapters have other values than those with which they change nothing, by their names alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32 and parameter.requires_grad:
                parameter.data = parameter.data.double()
            if parameter.requires_grad and "modules_to_save" not in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def adapters(**facts: Any) -> Any:
    """A row, where PEFT is installed."""
    return feature(**facts) if find_spec("peft") else lambda run: run


def adapter(name: str, apart: frozenset[str] = frozenset(), **facts: Any) -> None:
    """A change of the loop by an adapter, of which a model has one; where PEFT is installed."""
    if find_spec("peft"):
        change(name, apart={"adapter", *apart}, turn=1, **facts)


def added(add: Callable[[nn.Module], nn.Module]) -> Callable[[Side], None]:
    """What adds an adapter to a model on its mesh."""

    def placed(side: Side) -> None:
        with seeded(1):
            side.model = add(side.model)

    return placed


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def _merged_for_an_evaluation(side: Side, number: int) -> None:
    side.model.merge_adapter()
    side.evaluate(number + 1)
    side.model.unmerge_adapter()


def _off(side: Side, number: int) -> None:
    with side.model.disable_adapter():
        side.evaluate(number + 1)


adapter("lora_before", prepare=lora())
adapter("lora_after", placed=added(lora()))
adapter("dora", prepare=lora(use_dora=True))
adapter("lora_with_biases", prepare=lora(bias="lora_only", lora_bias=True, use_rslora=True))
adapter("ia3_before", prepare=ia3)
adapter("ia3_after", placed=added(ia3))
adapter("lora_of_experts", prepare=lora(**EXPERTS), needs={"experts"})
adapter(
    "lora_of_experts_after",
    placed=added(lora(**EXPERTS)),
    needs={"experts"},
    refused={"added-parameter": "those of experts over ep come before the plan"},
)
adapter(
    "merged_experts",
    prepare=lora(**EXPERTS),
    between=_merged_for_an_evaluation,
    needs={"experts"},
    refused={"unplanned-adapter": "ZeRO 3 shards adapters and experts over different ranks"},
)
adapter("merge_and_unmerge", prepare=lora(), between=_merged_for_an_evaluation)
adapter("adapters_off", prepare=lora(), between=_off)  # trained with adapters, evaluated without them


def _step_with_prompts(side: Side, number: int) -> None:
    """With a mask, to which PEFT adds the prompt."""
    mask = torch.ones_like(side.inputs(number)["input_ids"])
    side.step(number, **{"attention_mask": mask, **side.inputs(number)})


OVER_CP = {"wrong-rows": "the sequence that is divided over cp is shorter than the one with the prompt"}


PREFIX: dict[str, Any] = {"needs": PROMPTS, "without": {"recurrent"}, "refused": OVER_CP}
adapter(
    "prompt_tuning",
    prepare=prompts("PromptTuningConfig"),
    step=_step_with_prompts,
    needs=PROMPTS,
    refused=OVER_CP,
    apart=frozenset({"positions"}),  # logits have more of them
)
adapter(
    "prefix_tuning",
    prepare=prompts("PrefixTuningConfig"),
    step=_step_with_prompts,
    apart=frozenset({"replay"}),  # it would read the prefix twice, which PEFT leaves to the user
    refused_with={"*recompute*": {"cache-in-recompute": "a prefix is in a cache, which a replay would read again"}},
    **PREFIX,
)


@adapters(prepare=lora())
def merge_and_unload(side: Side) -> None:
    side.place()
    side.train()
    side.update()
    side.model.merge_and_unload()
    side.evaluate(2)


@adapters(names=("export_weights",), prepare=lora(), needs={"stock"})
def adapters_to_engines(side: Side) -> None:
    """Merged weights and the adapters alone, between two steps."""
    side.place()
    side.train()
    for number, name in enumerate(("merged", "alone")):
        for key, value in _exported(side, is_merged=name == "merged").items():
            side.record(f"weight {key} {name}", value)
        side.step(number)
        side.update()


def _exported(side: Side, is_merged: bool) -> dict[str, torch.Tensor]:
    if not side.alone:
        form: dict[str, Any] = {"merge_adapters": True} if is_merged else {"names": "peft"}
        buckets = export_weights(side.parallel, bucket=4096, **form)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}
    if is_merged:
        from safetensors.torch import load_file

        copy.deepcopy(side.model).merge_and_unload().save_pretrained(side.folder)
        return load_file(f"{side.folder}/model.safetensors")
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(side.model)


@adapters(prepare=lora())
def second_adapter(side: Side) -> None:
    from peft import LoraConfig

    targets = side.model.peft_config["default"].target_modules
    with seeded(1):
        side.model.add_adapter("second", LoraConfig(r=2, target_modules=targets))
    _moved(side.model)
    side.place()
    side.step(0)
    side.update()
    side.model.set_adapter("second")
    side.optimizers = []
    side.step(1)
    side.update()
    side.step(2)


@adapters(prepare=lora(), names=("save_adapter",))
def adapter_files(side: Side) -> None:
    """Saved after a step, loaded by PEFT into a model that was just built, and trained on."""
    fresh = copy.deepcopy(side.model)
    side.place()
    side.step(0)
    side.update()
    if not side.alone:
        save_adapter(side.parallel, f"{side.folder}/adapter")
        fresh.load_adapter(f"{side.folder}/adapter", "default", is_trainable=True)
        side.model, side.optimizers = fresh, []
        side.place()
    side.step(1)


adapter(
    "modules_to_save",
    prepare=lora(target_modules=["q_proj", "k_proj", "c_attn"], modules_to_save=["lm_head"]),
    needs=PROMPTS,
)


# Sizes of which each of four ranks has whole blocks of 16.
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "intermediate_size": 64},
    "gpt2": {"hidden_size": 64, "n_inner": 64},
    "mixture": {"head_dim": 8, "moe_intermediate_size": 64},
}
QUANTIZED: dict[str, Any] = {"needs": PROMPTS, "without": {"recurrent"}, "overrides": BLOCKS}


def quantized(form: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: lora(**options)(quantize(model, form))


adapter("nf4_with_lora", prepare=quantized("nf4(block=16)"), names=("quantize", "QuantizedLinear"), **QUANTIZED)
adapter(
    "nf4_recomputed", prepare=quantized("nf4(block=16)"), options={"recompute": "selective"}, meets=False, **QUANTIZED
)
adapter("nf4_with_dora", prepare=quantized("nf4(block=16)", use_dora=True), **QUANTIZED)  # which reads the weight
adapter(
    "nf4_with_lora_of_experts", prepare=quantized("nf4(block=16)", **EXPERTS), **{**QUANTIZED, "needs": {"experts"}}
)
adapter("int8_with_lora", prepare=quantized("int8(block=16)"), **QUANTIZED)
adapter("nf4_alone", prepare=lambda model: quantize(model, "nf4(block=16)"), **QUANTIZED)  # frozen codes


@adapters(prepare=quantized("nf4(block=16)"), **QUANTIZED)
def nf4_resumed_elsewhere(side: Side) -> None:
    fresh = copy.deepcopy(side.model)
    for parameter in fresh.parameters():
        if not parameter.is_floating_point():
            parameter.data.zero_()
    first_step(side, **ADAMW)
    go_on_elsewhere(side, fresh, **ADAMW)


@feature(prepare=lambda model: quantize(model, "int8(block=16)"), names=("dequantize",), **QUANTIZED)
def dequantized(side: Side) -> None:
    dequantize(side.model)
    side.place()
    side.train()
