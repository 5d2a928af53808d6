"""A `Difference` for a module: with the rule of the plan that matches it, and a fix."""

from __future__ import annotations

from parallelize.plan.pattern import generic, matches
from parallelize.tools.verification.configuration import Mode
from parallelize.tools.verification.evidence import Evidence
from parallelize.tools.verification.result import Difference


def difference(
    evidence: Evidence, mode: Mode, module: str, kind: str, what: str, *, others: tuple[str, ...] = (), fix: str = ""
) -> Difference:
    """A difference at `module`, with the rules of this module and of other suspects."""
    rule, where = _rule_of(evidence, module)
    suspects: dict[str, str] = {}  # pattern of fqns to its rule, without the module's own
    for name in others:
        if generic(name) != generic(module):
            suspects.setdefault(generic(name), _rule_of(evidence, name)[0])
    return Difference(
        str(mode),
        module or "the model",
        kind,
        what,
        rule=rule,
        where=where,
        others=tuple(suspects.items()),
        fix=fix or _fix(evidence, module, kind),
    )


def _rule_of(evidence: Evidence, module: str) -> tuple[str, str]:
    """(rule, line in the plan file) of the module, or else of its attribute under `local`."""
    row = evidence.row(module)
    if row is not None:
        return f"{row.rule.pattern}: {row.rule.style}", row.rule.where
    plan = evidence.resolved.plan if evidence.resolved else None
    for item in plan.local if plan else ():
        if matches(item.pattern, module):
            return f"local {item.pattern}: {item.attribute}", item.where
    return ("no rule matches it", plan.source) if plan and evidence.has_parameters(module) else ("", "")


def _fix(evidence: Evidence, module: str, kind: str) -> str:
    row = evidence.row(module)
    if kind == "raised" and (row is None or row.contract.traits.shares_input) and not evidence.has_parameters(module):
        return "list the head counts and widths that its forward reads under `local:`; check that each colwise module feeds a rowwise module"
    if kind == "permuted-chunks":
        return "name the chunks in the order of the weight: `colwise(heads + kv_heads + kv_heads)`, or `chunks=2`"
    if row is None and evidence.has_parameters(module):
        return "write a rule for it"
    return ""
