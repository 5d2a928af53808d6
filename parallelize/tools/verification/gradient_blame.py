"""Wrong gradients where all outputs are right: which reduction is missing, from the ranks' local gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallelize.base.errors import short_list
from parallelize.plan.pattern import generic
from parallelize.tools.verification.compare import Errors
from parallelize.tools.verification.configuration import Mode
from parallelize.tools.verification.evidence import LOOSER, Evidence
from parallelize.tools.verification.module_trace import ModuleCall
from parallelize.tools.verification.naming import difference
from parallelize.tools.verification.relations import WRONG, Relation, relate
from parallelize.tools.verification.result import Difference

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
    what = _explanation(last, relation, wrong)
    reader = _reader_without_reduction(evidence, module, wrong)
    if reader is not None:
        kind, fix = "missing-reduction", _FIXES["missing-reduction"]
        what += f". The gradient of its output is not summed where {generic(reader.name)} reads it"
        return difference(evidence, mode, reader.name, kind, what, others=(module,), fix=fix)
    return difference(evidence, mode, module, relation.kind, what, fix=_FIXES.get(relation.kind, ""))


def _explanation(last: str, relation: Relation, wrong: list[str]) -> str:
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
    """The difference if no parameter's gradient is wrong, but the loss, the input's gradient, the norm or the weights are."""
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
