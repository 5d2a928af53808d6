"""`derive_plan`: a plan for a model that nobody wrote one for, from its own forward, proven equal before it is handed
over."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.local_inputs import advice_on_widths
from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.plan.dims.factor_analysis import PROOF_FAILED, Choice, FactorAnalysis
from parallelize.plan.dims.record import Record
from parallelize.plan.dims.trace import record_forward
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import ModelSource, source_of
from parallelize.plan.pattern import generic
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.schema import ALLOWED, Plan
from parallelize.tools.derivation.counted_fields import counted_fields
from parallelize.tools.derivation.draft import Draft, Drafting
from parallelize.tools.derivation.gathered_linears import (
    ENOUGH,
    STYLE,
    gathered_linears,
    is_sharded,
    layer_share,
    of_samples,
    other_matrices,
    without_alike,
)
from parallelize.tools.derivation.patterns import leaves_something, names_of
from parallelize.tools.derivation.plan_text import Heading, Sections, has_width, plan_text
from parallelize.tools.derivation.proof import Proof, provable, prove, prove_in_evaluation
from parallelize.tools.derivation.region_search import ProposedRegion, find_regions, layer_lists
from parallelize.tools.derivation.small_model import check_subject, explained, in_dtype_of, small_model
from parallelize.tools.derivation.text_attention import proposed_attention

log = logging.getLogger("parallelize")

_LOGITS = ("vocabulary", "full", "")
"""How a head returns its logits, the best first; empty: head and table are left whole."""

MAX_ROUNDS = 6
"""How often a draft is made, each without what the proof of the one before it named."""


@dataclass(frozen=True)
class Derived:
    """A derived plan.

    Attributes:
        plan: as `parallelize_module` takes it. text: its file.
        whole: why linears, and other matrices of layers, are not sharded, by name.
        share: of the elements of parameters, those that are sharded.
        proof: what was compared; None: nothing, because the caller said so.
        model: the model that was recorded, small where it was made from a config.
    """

    plan: Plan
    text: str
    whole: Mapping[str, str]
    share: float
    proof: Proof | None
    model: nn.Module


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
        model: a config or its folder, a model type of `transformers`, a published size, `package.module:function`, a
            module, or a function that returns one. A config is scaled down and keeps its structure; other models are
            run as they are.
        example_inputs: keyword arguments of the forward, or positional ones, in any floating dtype: a copy of the model
            in float32 is run. None: by the model's main input.
        overrides: fields of the config, or keyword arguments of the function.
        tp: the number of ranks of the proof, at least 2.
        verified: whether the plan is proven. False says so in the file.
        tell: called with a line of text before each step.

    Returns: the plan with its file. Linears that cannot be proven are left whole, with the reason.
    Raises: ModelError `unknown-inputs`, `untraceable-model`, `too-large-to-run`, `nothing-to-shard`, and, of the
        unsharded model, `reference-failed`, `not-finite`, `not-deterministic`; MeshError `bad-mesh`; what reading the
        model raises.
    Cost: a forward, and a few training steps of the scaled model on the CPU. Random numbers are those of a seed of its
        own, so that all ranks of a job derive the same plan, and the caller's generator is left alone.
    """
    if tp < 2:
        raise MeshError(
            Problem("bad-mesh", f"nothing is split over tp={tp}, so that nothing can be proven", fix="tp=2")
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source, subject = small_model(source_of(model, overrides), tp)
        check_subject(subject)
        inputs = inputs_of(source, subject) if example_inputs is None else in_dtype_of(subject, example_inputs)
        with explained(subject, inputs):
            source = provable(source, subject, inputs)
            tell("recording one forward")
            record = record_forward(subject, inputs)
        return _Derivation(source, subject, record, tp, tell).run(verified)


_CP = 2
"""The ranks of `cp` of a proof."""


class _Derivation:
    """Drafts plans from one record, until one is proven.

    Attributes:
        banned: linears that are left whole, because a proof failed with them sharded.
        allow: a check of source text that is turned off, because the forward does not reach what it refuses.
        failures: what proofs that failed said.
    """

    def __init__(self, source: ModelSource, model: nn.Module, record: Record, tp: int, tell: Callable[[str], None]):
        self.source, self.model, self.tp, self.tell = source, model, tp, tell
        self.record, self.analysis = record, FactorAnalysis(record, model)
        self.fields = counted_fields(model)
        self.banned: set[str] = set()
        self.allow = ""
        self.failures: list[str] = []

    def run(self, verified: bool) -> Derived:
        if not verified:
            return self._unproven()
        for _ in range(MAX_ROUNDS):
            draft, proof = self._proven(_LOGITS[0])
            if proof is None:
                break
            if proof.ok:
                return self._finished(draft, proof)
            if ALLOWED[0] in proof.slugs and not self.allow:
                self.allow = ALLOWED[0]
                continue
            without, inner = self._proven("")
            if inner is None or inner.ok:  # so that the vocabulary's shards were wrong
                derived = self._with_full_logits(without, inner)
                if derived is not None:
                    return derived
                break
            self._ban(inner)
        self.choice = self.analysis.choose(without=self.banned)
        alone = self._with_gathered(Draft(whole={whole.module: whole.reason for whole in self.choice.whole}))
        if alone is None:
            raise self._nothing()
        return alone

    def _finished(self, draft: Draft, proof: Proof) -> Derived:
        """The proven draft with gathered linears, where there are some, and with regions."""
        return self._with_gathered(draft) or self._derived(*self._with_region(draft, proof))

    def _shards_enough(self, draft: Draft) -> bool:
        return layer_share(self.model, draft.styles) >= ENOUGH

    def _with_gathered(self, draft: Draft) -> Derived | None:
        """The draft with gathered linears, in regions if enough is sharded there too; None: no such draft is proven."""
        gathered = self._gathered(draft)
        for _ in range(MAX_ROUNDS):
            if not gathered:
                break
            wider = self._restyled(draft, gathered)
            proof = self._prove(wider)
            if proof.ok:
                in_regions = self._with_region(wider, proof)
                return self._derived(*(in_regions if self._shards_enough(in_regions[0]) else (wider, proof)))
            fewer = without_alike(gathered, proof.module)
            gathered = fewer if fewer != gathered else {}
        return None

    def _gathered(self, draft: Draft) -> dict[str, str]:
        """The linears in no pair that are sharded: those that cost little, or, where pairs shard little of the layers,
        all."""
        gathered = gathered_linears(self.analysis, self.model, draft.styles, self.choice.partial)
        return of_samples(self.analysis, gathered) if self._shards_enough(draft) else gathered

    def _unproven(self) -> Derived:
        draft = self._draft(_LOGITS[0])
        draft = self._restyled(draft, self._gathered(draft))
        if not draft.styles:
            raise self._nothing()
        return self._derived(draft, None)

    def _with_full_logits(self, without: Draft, inner: Proof | None) -> Derived | None:
        """The draft whose head returns full logits, or else the one without the vocabulary; None: neither is proven."""
        draft = self._draft("full")
        draft = self._by_tensor(draft, without.by_tensor) if without.by_tensor else draft
        proof = self._prove(draft)
        if proof.ok:
            return self._finished(draft, proof)
        return None if inner is None else self._finished(without, inner)

    def _with_region(self, draft: Draft, proof: Proof) -> tuple[Draft, Proof]:
        """The draft with its sequence-parallel regions, or with the last of them alone, if that is proven too."""
        pairs = {name: style for name, style in draft.styles.items() if name not in draft.gathered}
        regions = find_regions(self.record, self.model, pairs)
        for chosen in [regions, *([regions[-1:]] if len(regions) > 1 else [])] if regions else []:
            wider = self._widened(draft, chosen)
            again = self._prove(wider)
            if again.ok:
                return wider, again
        return draft, proof

    def _widened(self, draft: Draft, regions: list[ProposedRegion]) -> Draft:
        styles = {name: style for region in regions for name, style in region.styles.items()}
        return replace(self._restyled(draft, styles), regions=[region.section for region in regions])

    def _with_attention(self, draft: Draft) -> Draft:
        """The draft with the attention of a text beside images or sounds over `cp`, if that is proven too."""
        for kinds in proposed_attention(self.model):
            wider = replace(draft, attention=dict(kinds))
            self.tell(f"proving it on cp={_CP}")
            again = prove(self.source, self._plan_of(wider), _CP, "cp")
            if again.ok:
                return wider
            log.debug("not proven: %s", again)
        return draft

    def _restyled(self, draft: Draft, styles: Mapping[str, str]) -> Draft:
        """The draft with these styles too. Of linears of no pair, it knows which are gathered now, and which are
        whole."""
        alone = {**draft.whole, **draft.gathered}
        styles = {**draft.styles, **styles}
        gathered = {name: reason for name, reason in alone.items() if styles.get(name) == STYLE}
        whole = {name: reason for name, reason in alone.items() if name not in gathered}
        wider = replace(draft, styles=styles, gathered=gathered, whole=whole)
        wider.default = "replicate" if leaves_something(self.model, styles) else ""
        return wider

    def _draft(self, logits: str) -> Draft:
        self.choice = self.analysis.choose(without=self.banned)
        return Drafting(self.model, self.analysis, self.choice, self.fields, logits, self.banned, self.tp).run()

    def _proven(self, logits: str) -> tuple[Draft, Proof | None]:
        """A draft and what its proof says; None: it shards nothing. Where it fails, forwards that may need what became
        local in full too are given both."""
        draft = self._draft(logits)
        if not _share(self.model, draft):
            return draft, None
        proof = self._prove_both(draft)
        modules = frozenset() if proof.ok else self._of_two_sizes(draft)
        if not modules:
            return draft, proof
        wider = self._by_tensor(draft, modules)
        again = self._prove_both(wider)
        return (wider, again) if again.ok else (draft, proof)

    def _of_two_sizes(self, draft: Draft) -> frozenset[str]:
        """Modules that read the width of an input, or compute a real number of what became local, as of a scale; in all
        layers alike."""
        numbers = self.record.numbers
        patterns = {
            generic(name)
            for name, sizes in draft.local.items()
            if any(has_width(attribute) or (name, attribute) in numbers for attribute in sizes)
        }
        return frozenset(name for name in draft.local if generic(name) in patterns)

    def _by_tensor(self, draft: Draft, modules: frozenset[str]) -> Draft:
        """The draft in which these modules, which then need a rule, know sizes in full too."""
        return replace(draft, styles={**dict.fromkeys(modules, "replicate"), **draft.styles}, by_tensor=modules)

    def _prove_both(self, draft: Draft) -> Proof:
        """Also in evaluation, where a forward may read other attributes that become local. What is added to a draft
        makes none local."""
        proof = self._prove(draft)
        again = prove_in_evaluation(self.source, self._plan_of(draft), self.tp) if proof.ok and draft.local else None
        if again is None or again.ok:
            return proof
        self._note(again)
        return again

    def _prove(self, draft: Draft) -> Proof:
        self.tell(f"proving it on {self.tp} ranks: {len(draft.styles)} modules are sharded")
        proof = prove(self.source, self._plan_of(draft), self.tp)
        if not proof.ok:
            self._note(proof)
        return proof

    def _note(self, proof: Proof) -> None:
        log.debug("not proven: %s", proof)
        self.failures.append(str(proof))

    def _plan_of(self, draft: Draft) -> Plan:
        return self._plan(_text(self.source, self.model, draft, None, self.allow))

    def _plan(self, text: str) -> Plan:
        return parse_plan(text, "derived plan", name=_name(self.source, self.model))

    def _derived(self, draft: Draft, proof: Proof | None) -> Derived:
        whole = {**draft.whole, **other_matrices(self.analysis, self.model, draft.styles)}
        lists = [] if draft.regions else layer_lists(self.record, self.model)
        draft = replace(draft, whole=with_advice(self.model, whole), layers=lists[0] if len(lists) == 1 else "")
        draft = draft if proof is None else self._with_attention(draft)
        text = _text(self.source, self.model, draft, str(proof or "not proven (--no-verify)"), self.allow)
        return Derived(self._plan(text), text, draft.whole, _share(self.model, draft), proof, self.model)

    def _nothing(self) -> ModelError:
        reasons: dict[str, str] = {}
        for module, reason in with_advice(self.model, {each.module: each.reason for each in self.choice.whole}).items():
            reasons.setdefault(reason, module)
        for module, reason in other_matrices(self.analysis, self.model, {}).items():
            reasons.setdefault(reason, module)
        rows = tuple((module, reason) for reason, module in list(reasons.items())[:8])
        what = f"no linear of {self.source.text} can be sharded"
        fix = "data parallelism, or a plan of your own"
        common = _common_error(self.failures)
        if common:  # what is sharded makes no difference to it
            what, rows = f"no plan of {self.source.text} is proven, whatever it shards", (("proof", common), *rows)
            fix = "mend what the proof says, or data parallelism"
        return ModelError(Problem("nothing-to-shard", what, rows=rows, fix=fix))

    def _ban(self, proof: Proof) -> None:
        """Leave whole what a failed proof names, or else the largest of what is sharded."""
        styles = self._draft("").styles
        others = {name for name, style in styles.items() if style.startswith(("experts", "multihead"))}
        suspects = _suspects(proof, self.choice)
        if not suspects and others:
            suspects = others
        elif not suspects and self.choice.candidates:
            suspects = self.choice.candidates[0].linears
        self.banned |= suspects


def _common_error(texts: list[str]) -> str:
    """The line that says what was raised, where that of several failures is the same, wherever it was seen; empty: they
    differ."""
    raised = [re.search(r"^ +what +(\w+: .*?)(?:; seen at .*)?$", text, re.MULTILINE) for text in texts]
    whats = {match[1] for match in raised if match}
    return whats.pop() if len(texts) > 1 and all(raised) and len(whats) == 1 else ""


def _name(source: ModelSource, model: nn.Module) -> str:
    return str(getattr(source.config, "model_type", "") or type(model).__name__)


def _text(source: ModelSource, model: nn.Module, draft: Draft, proof: str | None, allow: str = "") -> str:
    share = f"{_share(model, draft):.0%} of the parameters of this (small) model are sharded"
    about = (f"derived from one forward of {type(model).__name__}; {share}", *((proof,) if proof else ()))
    model_type = str(getattr(source.config, "model_type", ""))
    prefix = getattr(model, "base_model_prefix", "")
    base = (
        prefix
        if prefix and any(name.startswith(prefix + ".") for name in draft.styles) and hasattr(model, prefix)
        else ""
    )
    below = [name for name in draft.sizes if name.startswith("kv_heads") or name in draft.below]
    sections = Sections(
        draft.styles,
        draft.sizes,
        below,
        draft.local,
        draft.whole,
        regions=draft.regions,
        allow=allow,
        default=draft.default,
        gathered=draft.gathered,
        by_tensor=draft.by_tensor,
        layers=draft.layers,
        attention=draft.attention,
    )
    return plan_text(
        Heading(about, model_type, "" if model_type else type(model).__name__, base), sections, names_of(model)
    )


def _share(model: nn.Module, draft: Draft) -> float:
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    sharded = sum(size for name, size in elements.items() if is_sharded(name, draft.styles))
    return sharded / max(1, sum(elements.values()))


def _suspects(proof: Proof, choice: Choice) -> set[str]:
    """The linears of the block that a failed proof names, in every layer alike; of a text that names several, of the
    first that has some."""
    linears = {name for candidate in choice.candidates for name in candidate.linears}
    if proof.module:
        return _linears_near(generic(proof.module), linears)
    # a word may be a module's name too
    for name in sorted(_NAME.findall(proof.text), key=lambda name: "." not in name):
        within = "*" if "*" in generic(name) else ""  # the layer: what is named in the model is not all of the model
        if suspects := _linears_near(generic(name), linears, within, widest=bool(within)):
            return suspects
    return set()


_NAME = re.compile(r"[\w*]+(?:\.[\w*]+)*")
"""A name of a module or parameter in a text, or what looks like one."""


def _linears_near(block: str, linears: set[str], within: str = "", widest: bool = True) -> set[str]:
    """The linears in a block, or else in the innermost block around it that has some.

    Args:
        within: a segment that a block around it must have. widest: whether blocks around it count.
    """
    for depth in range(block.count(".") + 1 if widest else 1):
        prefix = block.rsplit(".", depth)[0] if depth else block
        if within not in prefix:
            break
        suspects = {name for name in linears if f"{generic(name)}.".startswith(f"{prefix}.")}
        if suspects:
            return suspects
    return set()


# -- left whole ------------------------------------------------------------------------------------------------------
# What to change in a forward whose linears were left whole because the proof failed with them sharded.


def with_advice(model: nn.Module, whole: Mapping[str, str]) -> dict[str, str]:
    """The reasons by linear, with the line and the edit where the forward around a linear takes the width of a head
    from its input."""
    return {name: _advised(model, name, reason) for name, reason in whole.items()}


def _advised(model: nn.Module, name: str, reason: str) -> str:
    advice = advice_on_widths(type(model.get_submodule(name.rpartition(".")[0]))) if reason == PROOF_FAILED else ""
    return advice or reason
