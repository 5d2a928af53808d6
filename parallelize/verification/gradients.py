"""Outputs that are right with gradients that are not: what the ranks' own gradients say about the reduction they lack."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallelize.errors import short_list
from parallelize.plan.pattern import generic
from parallelize.verification.case import Mode
from parallelize.verification.compare import Errors
from parallelize.verification.evidence import Evidence
from parallelize.verification.naming import difference
from parallelize.verification.relate import WRONG, Relation, relate
from parallelize.verification.report import Difference
from parallelize.verification.watch import Seen

T = torch.Tensor


def blame_gradients(evidence: Evidence, mode: Mode, errors: Errors) -> Difference:
    """The last parameter with a wrong gradient in the order of the forward: backward meets it first."""
    if not errors.wrong:
        return _blame_rest(evidence, mode, errors)
    order = _order(evidence)
    wrong = sorted(errors.wrong, key=lambda name: order.get(name.rpartition(".")[0], -1))
    last = wrong[-1]
    module = last.rpartition(".")[0]
    relation = _of_parameter(evidence, last)
    if relation.right:  # by the looser bound of relations
        relation = Relation("differs")
    text = WRONG.get(relation.kind, "") or "it is in no simple relation to the unsharded gradient"
    what = f"the gradient of {generic(last)}: {text}"
    if relation.kind in ("doubled-reduction", "wrong-scale"):
        what += f" ({relation.ratio:.6g} times)"
    others = short_list(list(dict.fromkeys(generic(name) for name in wrong[::-1] if generic(name) != generic(last))), 3)
    what += f"; also {others}" if others else ""
    edge = _edge_after(evidence, module, wrong)
    if edge is not None:
        what += f". Its output's gradient is not summed where {generic(edge.name)} reads it"
        return _found(evidence, mode, edge.name, "missing-reduction", what, module)
    return _found(evidence, mode, module, relation.kind, what)


def _found(evidence: Evidence, mode: Mode, module: str, kind: str, what: str, other: str = "") -> Difference:
    fix = ""
    if kind == "missing-reduction":
        fix = "`sequence` for a norm on sequence shards, `replicate(gradient=partial)` for one on this rank's heads"
    if kind == "doubled-reduction":
        fix = "`replicate`, where each rank's gradient is whole already"
    return difference(evidence, mode, module, kind, what, (other,) if other else (), fix)


def _order(evidence: Evidence) -> dict[str, int]:
    """Module to its first call."""
    found: dict[str, int] = {}
    for one in evidence.reference.seen:
        found.setdefault(one.name, one.entered)
    return found


def _of_parameter(evidence: Evidence, name: str) -> Relation:
    """How the ranks' gradients relate to the unsharded one."""
    want = evidence.reference.gradients.get(name)
    for group in evidence.groups:
        found = [evidence.traces[rank].gradients.get(name) for rank in group]
        got = [one for one in found if one is not None]
        if want is not None and len(got) == len(found):
            return _against(evidence, name, got, want)
    return Relation("differs")


def _against(evidence: Evidence, name: str, got: Sequence[T], want: T) -> Relation:
    row = evidence.parameter(name)
    if row is None or row.layout.dim is None:
        return relate(got, want, evidence.bound)
    dim = row.layout.dim
    kinds = []
    for rank, local in enumerate(got):
        parts = [want[pair.full] for pair in row.layout.slices(rank)]
        mine = torch.cat(parts, dim) if parts else want.narrow(dim, 0, 0)
        if mine.numel() and local.ndim == mine.ndim:
            size = mine.shape[dim]
            kinds.append(
                relate([local.narrow(dim, 0, size) if local.shape[dim] > size else local], mine, evidence.bound)
            )
    wrong = [kind for kind in kinds if not kind.right]
    same = len({(kind.kind, round(kind.ratio, 6)) for kind in wrong}) == 1
    return wrong[0] if wrong and same else Relation("differs")


def _edge_after(evidence: Evidence, module: str, wrong: list[str]) -> Seen | None:
    """Who reads a module's output without summing its gradient; None where the parameter alone is wrong."""
    calls = [one for one in evidence.reference.seen if one.name == module]
    if not calls or len({generic(name) for name in wrong}) == 1:
        return None
    relation = evidence.relation(calls[0], "grad")
    if relation is None or relation.right:
        return None
    readers = [
        o for o in evidence.reference.seen if o.took == calls[0].gave and o.entered > calls[0].left >= 0 and o.took
    ]
    return readers[0] if readers else None


def _blame_rest(evidence: Evidence, mode: Mode, errors: Errors) -> Difference:
    """Only what follows after the gradients is wrong, or what goes into the model."""
    bound = evidence.bound / 100
    wrong = [what for what, (error, _) in errors.worst.items() if not error <= bound]
    names = {
        "loss": (
            "the loss",
            "outputs are right and the loss is not: the sum over tokens, or the count it is divided by",
        ),
        "input gradients": ("the input", "the gradient that leaves the model is not the unsharded one"),
        "gradient norm": ("clip_grad_norm_", "every gradient is right and their norm is not"),
        "weights": ("the optimiser's step", "every gradient is right, and the weights after the step are not"),
    }
    first = next((what for what in names if what in wrong), "")
    place, text = names.get(first, ("the model", errors.failed or "no module was named"))
    return Difference(str(mode), place, "raised" if errors.failed else "differs", text)
