"""Adapters of PEFT that are added, switched or merged after the plan, and those of some layers, tokens or modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize import Checkpointer, quantize
from tests.matrix.features.adapters import PROMPTS, QUANTIZED, adapter, adapters, added, lora
from tests.matrix.sides import Side, seeded

PLAIN: dict[str, Any] = {"needs": PROMPTS, "without": {"recurrent", "experts"}}
ATTENTION = ["q_proj", "c_attn"]
ENDS = ["embed_tokens", "lm_head", "wte"]
COPIES = {"added-parameter": "over data axes and stages, copies of `modules_to_save` come before the plan"}
TIED = {"added-parameter": "a tied head of stages is one weight with their embedding"}
OF_A_HEAD = {
    "unplanned-adapter": "a fused loss takes the weight of the head alone",
    "deferred-logits": "the same, of an adapter around a head that is fused",
}
NOT_OVER_TP = {"unplanned-adapter": "rows of a sharded embedding, and weights that DoRA reads, belong to a plan"}
IN_FULL = {"unplanned-adapter": "ZeRO 3 has later adapters in full, and the weights in rows"}


adapter("lora_dropout", one_rank=True, prepare=lora(lora_dropout=0.2), without={"recurrent"})
adapter(
    "recomputed_lora_dropout",
    one_rank=True,
    prepare=lora(lora_dropout=0.2),
    options={"recompute": "full"},
    meets=False,
    **PLAIN,
)


def _of_the_last_layer(model: nn.Module) -> nn.Module:
    """A first stage has no adapter then, and sends activations without a gradient."""
    return lora(target_modules=[*ATTENTION, *ENDS], layers_to_transform=[1], use_rslora=True)(model)


TIED_TOKENS = {"reused-module": "embedding and head on different stages have one table of trained tokens"}
TOKENS = lora(target_modules=ATTENTION, trainable_token_indices=[1, 5, 40])
adapter(
    "lora_of_the_last_layer",
    prepare=_of_the_last_layer,
    apart=frozenset({"second layer"}),
    **PLAIN,
    refused_with={"fused_loss": OF_A_HEAD},
)
adapter(
    "trained_tokens",
    prepare=TOKENS,
    **PLAIN,
    refused={**NOT_OVER_TP, **TIED_TOKENS},
    refused_with={"fused_loss": OF_A_HEAD},
)
adapter("dora_after", placed=added(lora(use_dora=True)), **PLAIN, refused=NOT_OVER_TP)
adapter(
    "lora_of_ends_after",
    placed=added(lora(target_modules=[*ATTENTION, *ENDS])),
    refused=TIED,
    refused_with={"fused_loss": OF_A_HEAD},
    **PLAIN,
)
adapter(
    "lora_of_the_last_layer_after",
    placed=added(lora(target_modules=ATTENTION, layers_to_transform=[1])),
    apart=frozenset({"second layer"}),
    **PLAIN,
)
adapter(
    "modules_to_save_after",
    placed=added(lora(target_modules=ATTENTION, modules_to_save=["lm_head"])),
    **PLAIN,
    refused=COPIES,
)
adapter(
    "nf4_with_lora_after",
    prepare=lambda model: quantize(model, "nf4(block=16)"),
    placed=added(lora()),
    **QUANTIZED,
)


@adapters()
def adapters_by_turns(side: Side) -> None:
    """A first adapter, a second one that is added to a model that has trained, and the first again."""
    from peft import LoraConfig

    side.place()
    with seeded(1):
        side.model = lora()(side.model)
    for name in ("default", "second", "default"):
        if name not in side.model.peft_config:
            with seeded(2):
                targets = side.model.peft_config["default"].target_modules
                side.model.add_adapter(name, LoraConfig(r=2, target_modules=targets))
        side.model.set_adapter(name)
        side.optimizers = []
        side.optimizer(torch.optim.AdamW, eps=1e-2)
        for number in range(2):
            side.step(number)
            side.clip(0.5)
            side.update()


@adapters(**PLAIN)
def later_adapter_resumed(side: Side) -> None:
    """A checkpoint has adapters that came after the plan."""
    side.place()
    with seeded(1):
        side.model = lora()(side.model)
    side.train()
    side.update()
    if not side.alone:
        with Checkpointer(f"{side.folder}/run", side.parallel) as checkpoints:
            checkpoints.save(1)
            with torch.no_grad():
                for parameter in side.model.parameters():
                    parameter.zero_()
            checkpoints.resume()
    side.step(2)


# -- merged before their first forward ---------------------------------------------------------------------------------


def _merged(model: nn.Module) -> nn.Module:
    model.merge_adapter()
    return model


def _merged_and_not(model: nn.Module) -> nn.Module:
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def _each_layer(model: nn.Module) -> nn.Module:
    from peft.tuners.lora.layer import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    return model


def _unloaded(model: nn.Module) -> nn.Module:
    with model.disable_adapter():
        return model.unload()


USES: dict[str, Callable[[Any], nn.Module]] = {
    "merged_for_good": lambda model: model.merge_and_unload(),
    "merged": _merged,
    "merged_and_unmerged": _merged_and_not,
    "merged_by_layer": _each_layer,
    "unloaded": _unloaded,
}


def _evaluates_after(use: Callable[[Any], nn.Module]) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        side.place()
        with seeded(1):
            side.model = lora()(side.model)
        side.model = use(side.model)
        side.evaluate(0)

    return run


ON_STAGES = {"unplanned-adapter": "stages plan together, which a layer that is merged by itself cannot ask of them"}

for _name, _use in USES.items():
    _refused = IN_FULL | ON_STAGES if _use is _each_layer else IN_FULL
    adapters(name=f"{_name}_before_a_forward", **PLAIN, refused=_refused)(_evaluates_after(_use))
