"""The part of a model of texts with images or sounds that is called with embedded sequences. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.schema import Plan

_TOWERS = ("vision_config", "audio_config")


def text_part(model: ModelFacts) -> str:
    """The fqn of the text model of `transformers` beside a tower: what runs before it embeds tokens, and puts what the
    tower returns in the places of some. Empty: the model has no such part.
    """
    config = getattr(model.root, "config", None)
    text = getattr(config, "text_config", None)
    if text is None or all(getattr(config, name, None) is None for name in _TOWERS):
        return ""
    return next((name for name, inner in model.objects.items() if _config_of(inner) is text), "")


def sequence_module(plan: Plan, model: ModelFacts) -> str:
    """The fqn of the module at whose call `cp` shards sequences, by the plan or else by the model; empty: the model
    itself.

    Raises: PlanError `unknown-module`.
    """
    if not plan.sequences:
        return text_part(model)
    if plan.sequences not in model.modules:
        what = f"`sequences: {plan.sequences}` names no module of {type(model.root).__name__}"
        raise PlanError(Problem("unknown-module", what, plan.source, fix=did_you_mean(plan.sequences, model.modules)))
    return plan.sequences


def is_head(name: str, model: ModelFacts) -> bool:
    """Whether a module is the head that returns logits."""
    head = getattr(model.root, "get_output_embeddings", lambda: None)()
    return head is not None and model.objects.get(name) is head


def later_features(model: ModelFacts, layers: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(tower, layer) where features of a tower's inner layers are added to the outputs of the first layers of the text,
    one after each: the last of these layers. [Meng et al., DeepStack, arXiv:2406.04334]
    """
    vision = getattr(getattr(model.root, "config", None), "vision_config", None)
    count = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    tower = next((name for name, inner in model.objects.items() if _config_of(inner) is vision), "")
    if not count or not tower or not text_part(model):
        return ()
    return ((tower, layers[min(count, len(layers)) - 1]),)


def _config_of(module: object) -> object:
    return vars(module).get("config")
