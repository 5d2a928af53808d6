"""A place in the model, told with the rule of the plan that serves it, and with what to do."""

from __future__ import annotations

from parallelize.plan.pattern import generic, matches
from parallelize.verification.case import Mode
from parallelize.verification.evidence import Evidence
from parallelize.verification.report import Difference


def difference(
    evidence: Evidence, mode: Mode, module: str, kind: str, what: str, others: tuple[str, ...] = (), fix: str = ""
) -> Difference:
    """A finding with the rules that serve the places it names."""
    rule, where = _rule_of(evidence, module)
    names = list(dict.fromkeys(generic(name) for name in others if generic(name) != generic(module)))
    beside = tuple((name, _rule_of(evidence, next(o for o in others if generic(o) == name))[0]) for name in names)
    return Difference(
        str(mode), module or "the model", kind, what, rule, where, beside, fix or _fix(evidence, module, kind)
    )


def _rule_of(evidence: Evidence, module: str) -> tuple[str, str]:
    """(rule, line): of the module, else of what it holds for itself."""
    row = evidence.row(module)
    if row is not None:
        return f"{row.rule.pattern}: {row.rule.style}", row.rule.where
    plan = evidence.resolved.plan if evidence.resolved else None
    for item in plan.local if plan else ():
        if matches(item.pattern, module):
            return f"local {item.pattern}: {item.attribute}", item.where
    return ("no rule serves it", plan.source) if plan and evidence.has_parameters(module) else ("", "")


def _fix(evidence: Evidence, module: str, kind: str) -> str:
    row = evidence.row(module)
    if kind == "raised" and (row is None or row.contract.style == "gather") and not evidence.has_parameters(module):
        return "list the head counts and widths that its forward reads under `local:`; see that each colwise meets a rowwise"
    if kind == "permuted-chunks":
        return "name the chunks as they lie in the weight: `colwise(heads + kv_heads + kv_heads)`, or `chunks=2`"
    if row is None and evidence.has_parameters(module):
        return "write a rule for it"
    return ""
