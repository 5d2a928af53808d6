"""Which module is to blame, and for what: the first whose output cannot be right though its input is.

Forward first, in the order of calls. Where every output is right, the gradients, from the loss backwards. A module that
gets what its rule does not expect is not guilty: then the one that feeds it is.
"""

from __future__ import annotations

from parallelize.layout import Layout
from parallelize.plan.pattern import generic
from parallelize.verification.case import Case, Mode
from parallelize.verification.compare import Errors
from parallelize.verification.evidence import Evidence
from parallelize.verification.gradients import blame_gradients
from parallelize.verification.naming import difference
from parallelize.verification.relate import WRONG, Relation
from parallelize.verification.report import Difference
from parallelize.verification.watch import Seen, Trace


def blame(case: Case, mode: Mode, errors: Errors, reference: Trace, traces: list[Trace], bound: float) -> Difference:
    """The first difference, named as well as the traces allow."""
    evidence = Evidence(case, mode, reference, traces, bound)
    diverged = next(
        (one for one in evidence.finished if (r := evidence.relation(one)) is not None and not r.right), None
    )
    raised = next(
        (trace.raised for trace in traces if trace.raised is not None and not _follows(trace.raised.error)), None
    )
    raised = raised or next((trace.raised for trace in traces if trace.raised is not None), None)
    if diverged is not None:
        relation = evidence.relation(diverged)
        assert relation is not None
        return _named(evidence, mode, diverged, relation.kind, _told(relation, case))
    if raised is not None and raised.outside:
        return Difference(str(mode), raised.outside, "raised", raised.error)
    if raised is not None:
        call = next((one for one in reference.seen if one.name == raised.module), None)
        if call is not None and not (call.name == "" and evidence.was_made(call)):
            return _named(evidence, mode, call, "raised", raised.error)
    return _outputs(evidence, mode, errors, raised.error if raised else "") or blame_gradients(evidence, mode, errors)


def _follows(error: str) -> bool:
    """Errors of a rank that another one has left alone."""
    marks = ("never comes about", "call different things", "peer-lost", "does not answer", "Connection closed")
    return any(mark in error for mark in marks)


def _told(relation: Relation, case: Case) -> str:
    text = WRONG.get(relation.kind, "")
    if relation.kind in ("doubled-reduction", "wrong-scale"):
        ranks = " (the number of tp ranks)" if round(relation.ratio) == case.request.size("tp") else ""
        text = f"{text}: {relation.ratio:.6g} times the unsharded value{ranks}"
    return text or "the ranks' parts are in no simple relation to the unsharded value"


# -- who it is ------------------------------------------------------------------------------------------------------------


def _named(evidence: Evidence, mode: Mode, call: Seen, kind: str, what: str) -> Difference:
    suspects = _suspects(evidence, call, raised=kind == "raised")
    first, others = suspects[0], suspects[1:]
    if first.name != call.name:
        what = f"{what}; seen at {generic(call.name) or 'the model'}, fed by {generic(first.name)}"
    return difference(evidence, mode, first.name, kind, what, tuple(one.name for one in others))


def _suspects(evidence: Evidence, call: Seen, raised: bool) -> list[Seen]:
    """Who may be guilty of a call's output, most likely first; never empty."""
    row = evidence.row(call.name)
    if row is not None and row.contract.style != "gather":
        return [call, *_odd(evidence, evidence.before(call))] if _expects(evidence, call) else _feeders(evidence, call)
    if evidence.has_parameters(call.name):  # whole, by no rule
        return [call, *_odd(evidence, evidence.before(call))]
    children = [one for one in evidence.inside(call) if evidence.was_made(one)]
    if row is None and not any(evidence.has_parameters(one.name) for one in children):
        return _feeders(evidence, call)  # an activation is what it was fed
    odd = _odd(evidence, children[::-1])
    if raised:  # chunks in another order give wrong numbers; a count left whole gives shapes that do not meet
        odd.sort(key=lambda one: _is_part(evidence, one))
        return [*(one for one in odd if not _is_part(evidence, one)), call, *odd]
    return [*odd, call]


def _expects(evidence: Evidence, call: Seen) -> bool:
    """Whether a module gets what its style works on."""
    row, fed = evidence.row(call.name), evidence.relation(call, "input")
    if row is None or fed is None:
        return True
    layout = evidence.weight_layout(call.name)
    contracts = row.contract.style == "rowwise" and row.rule.style.options.get("input") != "full"
    if layout is not None and (contracts or row.contract.style == "rms_norm"):
        if fed.kind == "shard" and fed.dim != 1 and not layout.is_canonical:
            return True  # its input lies in order, so its own order is the wrong one
        return evidence.lies_as(call, "input", layout)
    return fed.right


def _feeders(evidence: Evidence, call: Seen) -> list[Seen]:
    """What ran before a module that got the wrong thing: first what is as wide as that, and split in another way."""
    before = [one for one in evidence.before(call) if evidence.has_parameters(one.name)]
    if before and not _may_split(evidence, before[0], call):
        return [call, *before]
    wanted = evidence.weight_layout(call.name)
    unlike = [one for one in before if wanted is not None and _differs(evidence.weight_layout(one.name), wanted)]
    odd = _odd(evidence, before)
    return list({one.key: one for one in (*odd, *unlike, *before, call)}.values())


def _may_split(evidence: Evidence, fed_by: Seen, call: Seen) -> bool:
    """Whether a plan would split what this module gives: not a norm between blocks, nor an embedding."""
    row = evidence.row(fed_by.name)
    beside = fed_by.name.rpartition(".")[0] == call.name.rpartition(".")[0]
    return evidence.is_linear(fed_by.name) or (beside and row is not None and row.contract.style != "sequence")


def _differs(layout: Layout | None, wanted: Layout) -> bool:
    """Whether a layout as wide as another one cuts in another place."""
    if layout is None or layout.dim is None or wanted.dim is None:
        return False
    return layout.shape[layout.dim] == wanted.shape[wanted.dim] and layout.owned != wanted.owned


def _odd(evidence: Evidence, calls: list[Seen]) -> list[Seen]:
    """Those among neighbours that stand out: no rule, whole among shards, or packed in a way that may be wrong."""
    calls = [one for one in calls if evidence.has_parameters(one.name)]
    shards = [one for one in calls if _is_part(evidence, one)]
    parents = {one.name.rpartition(".")[0] for one in shards} | evidence.contracting
    ruleless = [one for one in calls if evidence.row(one.name) is None]
    wholes = [one for one in calls if one.name.rpartition(".")[0] in parents and _is_whole_by_mistake(evidence, one)]
    wholes.sort(key=lambda one: not evidence.is_linear(one.name))  # a norm only passes on what it got
    packed = [one for one in shards if _is_packed(evidence, one)]
    return list({one.key: one for one in (*ruleless, *wholes, *packed)}.values())


def _is_whole_by_mistake(evidence: Evidence, call: Seen) -> bool:
    """Whole, and not because its rule sums it, or because it is a norm between blocks."""
    row = evidence.row(call.name)
    style = row.contract.style if row is not None else ""
    return (
        not _is_part(evidence, call) and style != "rowwise" and (style != "sequence" or evidence.is_linear(call.name))
    )


def _is_part(evidence: Evidence, call: Seen) -> bool:
    relation = evidence.relation(call)
    return relation is not None and relation.kind in ("shard", "slices") and relation.dim != 1


def _is_packed(evidence: Evidence, call: Seen) -> bool:
    """Several chunks in one weight: their order is what a plan gets wrong."""
    layout = evidence.weight_layout(call.name)
    return layout is not None and len(layout.chunks) > 1


# -- the model's own output -----------------------------------------------------------------------------------------------


def _outputs(evidence: Evidence, mode: Mode, errors: Errors, error: str) -> Difference | None:
    """Every module gave a part of what it should, and the model as a whole did not give all of it."""
    wrong = errors.worst.get("outputs", (0.0, ""))[0] * 100 > evidence.bound
    root = next((one for one in evidence.finished if one.name == ""), None)
    if not (wrong or error) or root is None:
        return None
    relation = evidence.relation(root)
    makers = [one for one in evidence.finished[::-1] if one.name and evidence.has_parameters(one.name)]
    maker = next((one for one in makers if str(evidence.relation(one)) == str(relation)), makers[0] if makers else root)
    if not error and relation is not None and relation.right and relation.kind == "whole":
        return difference(evidence, mode, maker.name, "differs", "an output of the model is off by more than rounding")
    what = error or f"the model's output is a {relation} of what it should be, on every rank"
    return difference(evidence, mode, maker.name, "raised" if error else "wrong-shape", what)
