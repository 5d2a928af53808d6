"""`derive_plan`: a plan for a model that nobody wrote one for, from its own forward, proven equal before it is handed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.derivation.classes import Choice, Classes
from parallelize.derivation.draft import Draft, Drafting
from parallelize.derivation.inputs import inputs_of
from parallelize.derivation.plan_text import Heading, Sections, plan_text
from parallelize.derivation.proof import Proof, prove, provable
from parallelize.derivation.trace import record_forward
from parallelize.errors import ModelError, ParallelizeError, PlanError, Problem
from parallelize.models.model_source import ModelSource, source_of
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.schema import ALLOWED, Plan
from parallelize.verification.scale import scaled, without_dropout

log = logging.getLogger("parallelize")

MAX_PARAMETERS = 200_000_000
"""A module of more parameters is not run on this machine: derive from a config, or from a function with smaller sizes."""

MAX_PROOFS = 6
"""How many drafts are proven, each without what the one before it got wrong."""


@dataclass(frozen=True)
class Derived:
    """A derived plan.

    Attributes:
        plan: as `parallelize_module` takes it. text: its file.
        whole: why linears are not sharded, by name.
        share: of the elements of parameters, those that are sharded.
        proof: what was compared; None: nothing, because the caller said so.
    """

    plan: Plan
    text: str
    whole: Mapping[str, str]
    share: float
    proof: Proof | None


def derive_plan(
    model: Any,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    tp: int = 2,
    verified: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Derived:
    """Derive a plan from one recorded forward of the model, and prove it on ranks in this process.

    Args:
        model: a config or its folder, a model type of `transformers`, a published size, `package.module:function`, a module, or a
            function that returns one. A config is scaled down and keeps its structure; other models are run as they are.
        example_inputs: keyword arguments of the forward, or positional ones. None: by the model's main input.
        overrides: fields of the config, or keyword arguments of the function.
        tp: the number of ranks of the proof.
        verified: whether the plan is proven. False says so in the file.
        tell: called with a line of text before each step.

    Returns: the plan with its file. Linears that cannot be proven are left whole, with the reason.
    Raises: ModelError `unknown-inputs`, `untraceable-model`, `too-large-to-run`, `nothing-to-shard`; what reading the model raises.
    Cost: a forward, and a few training steps of the scaled model on the CPU.
    """
    source = _small(source_of(model, overrides), tp)
    subject = source.build("cpu").eval()
    _check_size(subject)
    source = provable(source, subject, example_inputs)
    tell("recording one forward")
    classes = Classes(_recorded(source, subject, example_inputs), subject)
    fields = _fields(source.config)
    banned: set[str] = set()
    vocabulary, allow = True, ""
    for _ in range(MAX_PROOFS):
        choice = classes.choose(without=banned)
        draft = Drafting(subject, classes, choice, fields, vocabulary).run()
        if not draft.styles:
            break
        text = _text(source, subject, draft, None if verified else "not proven (--no-verify)", allow)
        plan = parse_plan(text, "derived plan", name=_name(source, subject))
        if not verified:
            return Derived(plan, text, draft.whole, _share(subject, draft), None)
        tell(f"proving it on {tp} ranks: {len(draft.styles)} modules are sharded")
        proof = prove(source, plan, tp)
        if proof.ok:
            text = _text(source, subject, draft, str(proof), allow)
            return Derived(replace(plan), text, draft.whole, _share(subject, draft), proof)
        log.info("not proven: %s", proof)
        suspects = _suspects(proof, choice, subject)
        if ALLOWED[0] in proof.slugs and not allow:
            allow = ALLOWED[0]
        elif suspects:
            banned |= suspects
        elif vocabulary:
            vocabulary = False
        else:
            banned |= {name for candidate in choice.candidates[:1] for name in candidate.linears}
    raise ModelError(_nothing(source, classes.choose(without=banned)))


def _small(source: ModelSource, tp: int) -> ModelSource:
    """A config is scaled down, without dropout."""
    if source.config is None:
        return source
    config = scaled(source.config, tp)
    without_dropout(config)
    return source.with_config(config)


def _check_size(model: nn.Module) -> None:
    elements = sum(parameter.numel() for parameter in model.parameters())
    if elements > MAX_PARAMETERS:
        what = f"{type(model).__name__} has {elements:,} parameters, and its forward is run on this machine"
        fix = "give its config, or a function that returns the model with smaller sizes"
        raise ModelError(Problem("too-large-to-run", what, fix=fix))


def _recorded(source: ModelSource, model: nn.Module, example: Any) -> Any:
    inputs = inputs_of(source, model) if example is None else example
    try:
        return record_forward(model, inputs)
    except ParallelizeError:
        raise
    except Exception as error:
        shapes = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in dict(inputs).items()} if isinstance(inputs, Mapping) else ""
        what = f"the forward of {type(model).__name__} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        fix = "give inputs: example_inputs=, or --inputs module:function, which returns keyword arguments"
        raise ModelError(Problem("untraceable-model", what, rows=(("inputs", str(shapes)),), fix=fix)) from error


def _fields(config: Any) -> dict[str, int]:
    """The integer fields of a config, also those of the configs inside it that are its text model's."""
    if config is None:
        return {}
    return {name: value for name, value in vars(config).items() if type(value) is int and value > 1}


def _name(source: ModelSource, model: nn.Module) -> str:
    return str(getattr(source.config, "model_type", "") or type(model).__name__)


def _text(source: ModelSource, model: nn.Module, draft: Draft, proof: str | None, allow: str = "") -> str:
    share = f"{_share(model, draft):.0%} of the parameters of this (small) model are sharded"
    about = (f"derived from one forward of {type(model).__name__}; {share}", *((proof,) if proof else ()))
    model_type = str(getattr(source.config, "model_type", ""))
    prefix = getattr(model, "base_model_prefix", "")
    base = prefix if prefix and any(name.startswith(prefix + ".") for name in draft.styles) and hasattr(model, prefix) else ""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters(remove_duplicate=False)]
    below = [name for name, size in draft.sizes.items() if name.startswith("kv_heads")]
    sections = Sections(draft.styles, draft.sizes, below, draft.local, draft.whole, allow=allow, default=draft.default)
    return plan_text(Heading(about, model_type, "" if model_type else type(model).__name__, base), sections, names)


def _share(model: nn.Module, draft: Draft) -> float:
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    sharded = sum(
        size
        for name, size in elements.items()
        if "replicate" not in draft.styles.get(name, draft.styles.get(name.rpartition(".")[0], "replicate"))
    )
    return sharded / max(1, sum(elements.values()))


def _suspects(proof: Proof, choice: Choice, model: nn.Module) -> set[str]:
    """The linears of the block that a failed proof names, in every layer alike."""
    from parallelize.plan.pattern import generic

    if not proof.module:
        return set()
    block = generic(proof.module)
    for depth in range(block.count(".") + 1):
        prefix = block.rsplit(".", depth)[0] if depth else block
        linears = {
            name
            for candidate in choice.candidates
            for name in candidate.linears
            if generic(name) == prefix or generic(name).startswith(prefix + ".")
        }
        if linears:
            patterns = {generic(name) for name in linears}
            return {name for c in choice.candidates for name in c.linears if generic(name) in patterns}
    return set()


def _nothing(source: ModelSource, choice: Choice) -> Problem:
    reasons: dict[str, str] = {}
    for whole in choice.whole:
        reasons.setdefault(whole.reason, whole.module)
    rows = tuple((module, reason) for reason, module in list(reasons.items())[:8])
    return Problem("nothing-to-shard", f"no linear of {source.text} can be sharded", rows=rows, fix="data parallelism, or a plan of your own")
