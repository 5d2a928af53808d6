"""Finds the module that causes a difference: the first module whose output is wrong although its input is right.

The forward is searched first, in the order of calls. If every output is right, the gradients are searched, from the
loss backward. A module whose input is not what its rule expects is not to blame: the module that computes the input is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from parallelize.base.errors import short_list
from parallelize.base.layout import Layout
from parallelize.plan.pattern import generic
from parallelize.plan.styles.contract import Traits
from parallelize.tools.verification.compare import Difference, Errors
from parallelize.tools.verification.configuration import Configuration, Mode
from parallelize.tools.verification.evidence import LOOSER, Evidence, difference
from parallelize.tools.verification.module_trace import ErrorRecord, ModuleCall, ModuleTrace
from parallelize.tools.verification.relations import WRONG, Relation, relate


def blame(
    configuration: Configuration,
    mode: Mode,
    errors: Errors,
    reference: ModuleTrace,
    traces: list[ModuleTrace],
    *,
    bound: float,
) -> Difference:
    """The first difference, named as precisely as the traces allow."""
    evidence = Evidence(configuration, mode, reference, traces, bound=bound)
    for call in evidence.finished:
        relation = evidence.relation(call)
        if relation is not None and not relation.right:
            return _difference_at_call(evidence, mode, call, relation.kind, _explanation(relation, configuration))
    error = _first_error(traces)
    if error is not None and error.outside:
        return Difference(str(mode), error.outside, "raised", error.message, slug=error.slug)
    if error is not None:
        failed = next((call for call in reference.calls if call.name == error.module), None)
        if failed is not None and not (failed.name == "" and evidence.was_made(failed)):
            return replace(_difference_at_call(evidence, mode, failed, "raised", error.message), slug=error.slug)
    return _model_output(evidence, mode, errors, error.message if error else "") or blame_gradients(
        evidence, mode, errors
    )


def _first_error(traces: list[ModuleTrace]) -> ErrorRecord | None:
    """The first error of any rank; one that follows from another rank's failure only if there is no other."""
    errors = [trace.error for trace in traces if trace.error is not None]
    return next((error for error in errors if not _follows(error.message)), errors[0] if errors else None)


def _follows(message: str) -> bool:
    """Whether an error follows from the failure of another rank."""
    marks = ("can never complete", "call different things", "peer-lost", "does not answer", "Connection closed")
    return any(mark in message for mark in marks)


def _explanation(relation: Relation, configuration: Configuration) -> str:
    text = WRONG.get(relation.kind, "")
    if relation.kind in ("doubled-reduction", "wrong-scale"):
        is_tp_size = round(relation.ratio) == configuration.request.size("tp")
        text = f"{text}: {relation.ratio:.6g} times the unsharded value"
        text += " (the number of tp ranks)" if is_tp_size else ""
    return text or "the ranks' parts are in no simple relation to the unsharded value"


# -- suspects ----------------------------------------------------------------------------------------------------------


def _difference_at_call(evidence: Evidence, mode: Mode, call: ModuleCall, kind: str, what: str) -> Difference:
    suspects = _suspects(evidence, call, raised=kind == "raised")
    first, others = suspects[0], suspects[1:]
    if first.name != call.name:
        what = f"{what}; seen at {generic(call.name) or 'the model'}, whose input is from {generic(first.name)}"
    return difference(evidence, mode, first.name, kind, what, others=tuple(other.name for other in others))


def _suspects(evidence: Evidence, call: ModuleCall, raised: bool) -> list[ModuleCall]:
    """Calls that may have caused a call's wrong output, most likely first. Never empty."""
    row = evidence.row(call.name)
    if row is not None and row.contract.owns_parameters:
        if not _has_expected_input(evidence, call):
            return _producers(evidence, call)
        return [call, *_unusual(evidence, evidence.before(call))]
    if evidence.has_parameters(call.name):  # replicated, without a rule
        return [call, *_unusual(evidence, evidence.before(call))]
    children = [child for child in evidence.inside(call) if evidence.was_made(child)]
    if row is None and not any(evidence.has_parameters(child.name) for child in children):
        return _producers(evidence, call)  # no parameters inside: a wrong output follows from the input
    unusual = _unusual(evidence, children[::-1])
    if raised:  # chunks in another order give wrong numbers; a count that is not local gives shapes that do not match
        unusual.sort(key=lambda child: _is_shard(evidence, child))
        return [*(child for child in unusual if not _is_shard(evidence, child)), call, *unusual]
    return [*unusual, call]


def _has_expected_input(evidence: Evidence, call: ModuleCall) -> bool:
    """Whether the module's input is what its style expects."""
    row, relation = evidence.row(call.name), evidence.relation(call, "input")
    if row is None or relation is None:
        return True
    layout = evidence.weight_layout(call.name)
    if layout is not None and row.contract.takes_shard:
        if relation.kind == "shard" and relation.dim != 1 and not layout.is_canonical:
            return True  # the input's chunks are in order, so the layout of the weight is wrong
        return evidence.has_layout(call, "input", layout)
    return relation.right


def _producers(evidence: Evidence, call: ModuleCall) -> list[ModuleCall]:
    """The calls before a module with a wrong input. Those with the same width and another layout come first."""
    before = [other for other in evidence.before(call) if evidence.has_parameters(other.name)]
    if before and not _may_shard(evidence, before[0], call):
        return [call, *before]
    layout = evidence.weight_layout(call.name)
    other_layouts = [
        other for other in before if layout is not None and _differs(evidence.weight_layout(other.name), layout)
    ]
    return _unique([*_unusual(evidence, before), *other_layouts, *before, call])


def _may_shard(evidence: Evidence, producer: ModuleCall, call: ModuleCall) -> bool:
    """Whether a plan would shard this module's output: not that of a norm between blocks, nor of an embedding."""
    row = evidence.row(producer.name)
    are_siblings = producer.name.rpartition(".")[0] == call.name.rpartition(".")[0]
    return evidence.is_linear(producer.name) or (are_siblings and row is not None and not row.contract.traits.by_token)


def _differs(layout: Layout | None, other: Layout) -> bool:
    """Whether two layouts split the same width at different positions."""
    if layout is None or layout.dim is None or other.dim is None:
        return False
    return layout.shape[layout.dim] == other.shape[other.dim] and layout.owned != other.owned


def _unusual(evidence: Evidence, calls: list[ModuleCall]) -> list[ModuleCall]:
    """Calls that differ from their siblings: no rule, replicated among shards, or packed in a way that may be wrong."""
    calls = [call for call in calls if evidence.has_parameters(call.name)]
    shards = [call for call in calls if _is_shard(evidence, call)]
    parents = {call.name.rpartition(".")[0] for call in shards} | evidence.rowwise_parents
    without_rule = [call for call in calls if evidence.row(call.name) is None]
    full = [call for call in calls if call.name.rpartition(".")[0] in parents and _may_lack_shard(evidence, call)]
    full.sort(key=lambda call: not evidence.is_linear(call.name))  # a norm's output only has the layout of its input
    packed = [call for call in shards if _is_packed(evidence, call)]
    return _unique([*without_rule, *full, *packed])


def _unique(calls: Iterable[ModuleCall]) -> list[ModuleCall]:
    return list({call.key: call for call in calls}.values())


def _may_lack_shard(evidence: Evidence, call: ModuleCall) -> bool:
    """Whether the output is full, and not because its rule sums it or because it is a norm between blocks."""
    row = evidence.row(call.name)
    traits = row.contract.traits if row is not None else Traits()
    is_block_norm = traits.by_token and not evidence.is_linear(call.name)
    return not _is_shard(evidence, call) and not traits.sums_output and not is_block_norm


def _is_shard(evidence: Evidence, call: ModuleCall) -> bool:
    """Whether the ranks' outputs are shards along a dim other than the sequence."""
    relation = evidence.relation(call)
    return relation is not None and relation.kind in ("shard", "slices") and relation.dim != 1


def _is_packed(evidence: Evidence, call: ModuleCall) -> bool:
    """Whether the weight has several chunks, whose order a plan may get wrong."""
    layout = evidence.weight_layout(call.name)
    return layout is not None and len(layout.chunks) > 1


# -- the model's own output --------------------------------------------------------------------------------------------


def _model_output(evidence: Evidence, mode: Mode, errors: Errors, error: str) -> Difference | None:
    """The difference if every module's output is right (in full or as a shard), but the model's output is wrong."""
    wrong = errors.worst.get("outputs", (0.0, ""))[0] * 100 > evidence.bound
    root = next((call for call in evidence.finished if call.name == ""), None)
    if not (wrong or error) or root is None:
        return None
    relation = evidence.relation(root)
    candidates = [call for call in evidence.finished[::-1] if call.name and evidence.has_parameters(call.name)]
    alike = [call for call in candidates if str(evidence.relation(call)) == str(relation)]
    last = (alike or candidates or [root])[0]
    if not error and relation is not None and relation.kind == "full":
        return difference(evidence, mode, last.name, "differs", "an output of the model is off by more than rounding")
    what = error or f"on every rank the model's output is only a part of the unsharded one: {relation}"
    return difference(evidence, mode, last.name, "raised" if error else "wrong-shape", what)


# -- gradient blame --------------------------------------------------------------------------------------------------
# Wrong gradients where all outputs are right: which reduction is missing, from the ranks' local gradients.


T = torch.Tensor
_FIXES = {
    "missing-reduction": (
        "`sequence` for a norm on sequence shards, `replicate(gradient=partial)` for one on this rank's heads"
    ),
    "doubled-reduction": "`replicate`, where each rank's gradient is full already",
}


def blame_gradients(evidence: Evidence, mode: Mode, errors: Errors) -> Difference:
    """The last parameter in the order of the forward whose gradient is wrong: backward reaches it first."""
    if not errors.wrong:
        return _blame_rest(evidence, mode, errors)
    first_calls = _first_calls(evidence)
    wrong = sorted(errors.wrong, key=lambda name: first_calls.get(name.rpartition(".")[0], -1))
    last = wrong[-1]
    module = last.rpartition(".")[0]
    relation = _relation_of_parameter(evidence, last)
    if relation.right:  # by the looser bound of relations
        relation = Relation("differs")
    what = _gradient_explanation(last, relation, wrong)
    reader = _reader_without_reduction(evidence, module, wrong)
    if reader is not None:
        kind, fix = "missing-reduction", _FIXES["missing-reduction"]
        what += f". The gradient of its output is not summed where {generic(reader.name)} reads it"
        return difference(evidence, mode, reader.name, kind, what, others=(module,), fix=fix)
    return difference(evidence, mode, module, relation.kind, what, fix=_FIXES.get(relation.kind, ""))


def _gradient_explanation(last: str, relation: Relation, wrong: list[str]) -> str:
    text = WRONG.get(relation.kind, "") or "it is in no simple relation to the unsharded gradient"
    what = f"the gradient of {generic(last)}: {text}"
    if relation.kind in ("doubled-reduction", "wrong-scale"):
        what += f" ({relation.ratio:.6g} times)"
    others = short_list(list(dict.fromkeys(generic(name) for name in wrong[::-1] if generic(name) != generic(last))), 3)
    return what + (f"; also {others}" if others else "")


def _first_calls(evidence: Evidence) -> dict[str, int]:
    """When each module was first called."""
    entered: dict[str, int] = {}
    for call in evidence.reference.calls:
        entered.setdefault(call.name, call.entered)
    return entered


def _relation_of_parameter(evidence: Evidence, name: str) -> Relation:
    """The relation of the ranks' local gradients to the unsharded gradient."""
    full = evidence.reference.gradients.get(name)
    for group in evidence.groups:
        grads = [evidence.traces[rank].gradients.get(name) for rank in group]
        present = [grad for grad in grads if grad is not None]
        if full is not None and len(present) == len(grads):
            return _relation_of_gradients(evidence, name, present, full)
    return Relation("differs")


def _relation_of_gradients(evidence: Evidence, name: str, locals_: Sequence[T], full: T) -> Relation:
    """The relation if it is the same on all ranks whose gradient is wrong. Padding of uneven shards is ignored."""
    row = evidence.parameter(name)
    if row is None or row.layout.dim is None:
        return relate(locals_, full, evidence.bound)
    dim = row.layout.dim
    relations = []
    for rank, local in enumerate(locals_):
        parts = [full[pair.full] for pair in row.layout.slices(rank)]
        expected = torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)
        if expected.numel() and local.ndim == expected.ndim:
            size = expected.shape[dim]
            unpadded = local.narrow(dim, 0, size) if local.shape[dim] > size else local
            relations.append(relate([unpadded], expected, evidence.bound))
    wrong = [relation for relation in relations if not relation.right]
    same = len({(relation.kind, round(relation.ratio, 6)) for relation in wrong}) == 1
    return wrong[0] if wrong and same else Relation("differs")


def _reader_without_reduction(evidence: Evidence, module: str, wrong: list[str]) -> ModuleCall | None:
    """The call that reads a module's output without summing its gradient. None where only the parameter is wrong."""
    call = next((call for call in evidence.reference.calls if call.name == module), None)
    if call is None or len({generic(name) for name in wrong}) == 1:
        return None
    relation = evidence.relation(call, "grad")
    if relation is None or relation.right:
        return None
    readers = (
        other
        for other in evidence.reference.calls
        if other.input_address and other.input_address == call.output_address and other.entered > call.left >= 0
    )
    return next(readers, None)


def _blame_rest(evidence: Evidence, mode: Mode, errors: Errors) -> Difference:
    """The difference if no parameter's gradient is wrong, but the loss, the input's gradient, the norm or the weights
    are."""
    bound = evidence.bound / LOOSER
    wrong = [what for what, (error, _) in errors.worst.items() if not error <= bound]
    explanations = {
        "loss": (
            "the loss",
            "outputs are right and the loss is not: the sum over tokens, or the count it is divided by",
        ),
        "input gradients": ("the input", "the gradient of the model's input is not the unsharded one"),
        "gradient norm": ("clip_grad_norm_", "every gradient is right and their norm is not"),
        "weights": ("the optimizer's step", "every gradient is right, and the weights after the step are not"),
    }
    first = next((what for what in explanations if what in wrong), "")
    name, text = explanations.get(first, ("the model", errors.failed or "no module was named"))
    return Difference(str(mode), name, "raised" if errors.failed else "differs", text)
