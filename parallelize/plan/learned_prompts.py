"""Learned prompts of PEFT (prompt, P- and prefix tuning) over pipeline stages.

The forward of PEFT's model computes them, around that of the stock model. The first stage has the module that makes them. What it
returns for prefix tuning are keys and values of all layers, which the later stages get with the activations.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parallelize.base.errors import Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.schema import Cuts

PROMPTS = "prompt_encoder"
"""The attribute of PEFT's model that has a module for each adapter with learned prompts."""

PREFIX_ENCODER = "PrefixEncoder"
"""The class of PEFT that makes keys and values of prefix tuning."""

_BEFORE_EMBEDDINGS = ("PromptEmbedding", "PromptEncoder")
"""Those that make embeddings, which stand before those of the tokens."""


def makes_prefixes(model: ModelFacts) -> bool:
    """Whether PEFT computes keys and values that stand before those of each layer (prefix tuning)."""
    return any(facts.class_name == PREFIX_ENCODER for facts in model.modules.values())


def prompt_encoders(model: ModelFacts) -> tuple[str, ...]:
    """The names of the modules that make prompts, one for each adapter."""
    return tuple(name for name in model.modules if name.count(".") == 1 and name.partition(".")[0] == PROMPTS)


def with_prompts(cuts: Cuts, model: ModelFacts, last_user: str) -> Cuts:
    """The cuts of a model with learned prompts; the same cuts where it has none.

    Args:
        cuts: complete: modules before and after the layers are named.
        last_user: the last unit that keys and values of prefixes are used in.
    """
    encoders = prompt_encoders(model)
    if not encoders:
        return cuts
    prefixes = [name for name in encoders if model.modules[name].class_name == PREFIX_ENCODER]
    last = tuple(name for name in cuts.last if name.partition(".")[0] != PROMPTS)
    skips = tuple((name, last_user) for name in prefixes)
    return replace(cuts, first=(*encoders, *cuts.first), last=last, skips=(*cuts.skips, *skips))


def unserved_over_stages(model: ModelFacts) -> Iterator[Problem]:
    """Problems for prompts of other kinds, and of a model with an encoder and a decoder, over pipeline stages."""
    for name in prompt_encoders(model):
        kind, config = model.modules[name].class_name, model.root.peft_config[name.rpartition(".")[2]]
        if kind not in (*_BEFORE_EMBEDDINGS, PREFIX_ENCODER):
            what = f"{name} is a {kind}, of which no pipeline stage but the first has what PEFT's forward reads"
        elif config.num_transformer_submodules != 1:
            what = f"{name} makes prompts of an encoder and a decoder, which are on different pipeline stages"
        else:
            continue
        yield Problem("unplanned-adapter", what, fix="a mesh without pp; or LoRA, which every mesh serves")
