"""Losses of two models: a student and a teacher, a policy and its reference, on one mesh or on others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from parallelize import (
    candidate_log_probs,
    distillation_loss,
    linear_distillation_loss,
    sequence_log_probs,
    sequence_sum,
    token_log_probs,
    top_k_distillation_loss,
    top_k_log_probs,
)
from tests.matrix.feature import feature
from tests.matrix.features.losses import NOT_BY_HAND
from tests.matrix.habits import frozen
from tests.matrix.kinds import IGNORED, logits_of
from tests.matrix.sides import Side

T = torch.Tensor
PAIRS = 4
_GATHERED = "ZeRO 3 gathers a weight in its module alone"


def _teachers_logits(side: Side, number: int = 0) -> Any:
    """Of another model on the same mesh, without gradients."""
    with torch.no_grad():
        return logits_of(side.beside(frozen(side)).forward(number))


def _divergence(student: T, teacher: T, kind: str, temperature: float) -> T:
    """[rows, tokens], by PyTorch."""
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = ((p + q) / 2).log()
    return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2


def _distilled(side: Side, kind: str = "forward_kl", temperature: float = 1.0) -> None:
    targets = side.split(side.targets())
    teacher, student = _teachers_logits(side), logits_of(side.forward())
    if side.alone:
        loss = (_divergence(student, teacher, kind, temperature) * (targets != IGNORED)).sum() / side.count()
    else:
        loss = distillation_loss(
            student,
            teacher,
            divergence=kind,
            temperature=temperature,
            targets=targets,
            num_tokens=side.count(),
        )
    loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def divergence_from_a_teacher(side: Side) -> None:
    side.place()
    _distilled(side, "jsd", 1.5)


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def divergence_of_deferred_logits(side: Side) -> None:
    """Neither model's logits are ever stored."""
    side.place(fuse_loss=True)
    _distilled(side, "reverse_kl")


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def stock_divergence(side: Side) -> None:
    """As one process writes it, on logits of any form."""
    side.place()
    teacher, student = _teachers_logits(side), logits_of(side.forward())
    valid = side.split(side.targets()) != IGNORED
    elements = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="none")
    loss = elements.masked_fill(~valid.unsqueeze(-1), 0.0).sum() / side.count()
    loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused={**NOT_BY_HAND, "bad-head": _GATHERED}, needs={"text", "causal"}, others=(None,))
def divergence_of_hidden_states(side: Side) -> None:
    """Of two heads, whose weights the package finds sharded."""
    side.place()
    teacher, targets = frozen(side), side.split(side.targets())
    with torch.no_grad():
        theirs = _head_and_input(side.beside(teacher))
    head, hidden = _head_and_input(side)
    if side.alone:
        losses = _divergence(head(hidden), theirs[0](theirs[1]), "forward_kl", 1.0) * (targets != IGNORED)
        loss = losses.sum() / side.count()
    else:
        loss = linear_distillation_loss(
            hidden,
            head.weight,
            theirs[1],
            theirs[0].weight,
            bias=head.bias,
            teacher_bias=theirs[0].bias,
            targets=targets,
            num_tokens=side.count(),
            chunk=5,
        )
    loss.backward()
    side.record("loss", side.summed(loss))


def _head_and_input(side: Side) -> tuple[Any, T]:
    model, seen = side.model, {}
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.head  # type: ignore[operator]
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    side.forward()
    handle.remove()
    return head, seen["x"]


@feature(needs={"text", "causal"}, others=(None,), on=lambda axis: axis.ranks("cp") == 1)
def teacher_in_the_loss(side: Side) -> None:
    """A teacher that is whole on each rank is called by the loss of a step, also on the last stage of several."""
    teacher = side.others[0].requires_grad_(False).eval()

    def loss(output: Any, stored: dict[str, T]) -> T:
        with torch.no_grad():
            theirs = logits_of(teacher(stored["ids"]))
        if not side.alone:
            options = {"divergence": "reverse_kl", "targets": stored["targets"], "reduction": "sum"}
            return distillation_loss(logits_of(output), theirs, **options)
        return (_divergence(logits_of(output), theirs, "reverse_kl", 1.0) * (stored["targets"] != IGNORED)).sum()

    side.place(loss=loss, count=_counted)
    for number in range(2):
        ids = side.kind.batch(number)[0]["input_ids"]
        side.step(number, targets=side.local({"ids": ids, "targets": side.kind.batch(number)[1]}))
        side.update()


# -- the most probable entries ---------------------------------------------------------------------------------------


def _stored_entries(targets: T) -> dict[str, T]:
    """As a file of a teacher has them: three entries of each token, with log-probabilities that are no distribution's
    whole mass."""
    first = targets.clamp(min=0)
    ids = torch.stack((first, (first + 7) % 67, (first + 31) % 67), -1)
    shares = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64)
    return {"targets": targets, "ids": ids, "log_probs": shares.log().expand(ids.shape).contiguous()}


def _of_entries(output: Any, stored: dict[str, T]) -> T:
    """The sum over a microbatch, as a loss of a step returns it."""
    logits = logits_of(output)
    options = {"targets": stored["targets"], "reduction": "sum"}
    return top_k_distillation_loss(logits, stored["ids"], stored["log_probs"], **options)


def _of_entries_alone(output: Any, stored: dict[str, T]) -> T:
    log_q = logits_of(output).log_softmax(-1)
    chosen = log_q.gather(-1, stored["ids"])
    others = log_q.scatter(-1, stored["ids"], -torch.inf).logsumexp(-1, keepdim=True)
    log_p = torch.cat((stored["log_probs"], (1 - stored["log_probs"].exp().sum(-1, keepdim=True)).log()), -1)
    losses = (log_p.exp() * (log_p - torch.cat((chosen, others), -1))).sum(-1)
    return (losses * (stored["targets"] != IGNORED)).sum()


def _counted(stored: dict[str, T]) -> T:
    return (stored["targets"] != IGNORED).sum()


def _step_of_entries(side: Side, **options: Any) -> None:
    loss = _of_entries_alone if side.alone else _of_entries
    side.place(loss=loss, count=_counted, **options)
    for number in range(2):
        side.step(number, targets=side.local(_stored_entries(side.kind.batch(number)[1])))
        side.update()
    side.step(2, targets=side.local(_stored_entries(side.kind.batch(2)[1])))


@feature(needs={"text", "causal"})
def stored_entries_of_a_teacher(side: Side) -> None:
    """In a step, on any mesh: the entries are its targets."""
    _step_of_entries(side)


@feature(needs={"text", "causal"})
def stored_entries_and_a_fused_loss(side: Side) -> None:
    _step_of_entries(side, fuse_loss=True)


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def entries_of_a_teacher(side: Side) -> None:
    """They are found on shards, and the student's log-probabilities at them too."""
    side.place()
    teacher, student = _teachers_logits(side), logits_of(side.forward())
    valid = side.split(side.targets()) != IGNORED
    if side.alone:
        log_p, ids = teacher.log_softmax(-1).topk(4)
        log_q = student.log_softmax(-1).gather(-1, ids)
    else:
        ids, log_p = top_k_log_probs(teacher, 4)
        log_q = candidate_log_probs(student, ids)
    loss = ((log_p.exp() * (log_p - log_q)).sum(-1) * valid).sum() / side.count()
    loss.backward()
    side.record("loss", side.summed(loss))


# -- preferences -----------------------------------------------------------------------------------------------------


def _sequences(side: Side, model: Any = None) -> T:
    """[rows], of a model on this side's mesh."""
    other = side if model is None else side.beside(model)
    logits, ids = logits_of(other.forward()), side.split(side.targets())
    if not side.alone:
        return sequence_log_probs(logits, ids, side.mesh)
    chosen = logits.log_softmax(-1).gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen * (ids != IGNORED)).sum(1)


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def preference(side: Side) -> None:
    """Direct preference optimization: two rows are a pair, and a frozen copy is the reference."""
    side.place()
    reference = frozen(side)
    with torch.no_grad():
        theirs = _sequences(side, reference)
    margins = _sequences(side) - theirs
    loss = -F.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).sum() / PAIRS
    loss.backward()
    side.record("loss", side.summed(loss) / (1 if side.alone else side.axis.ranks("cp")))


def _stored_reference(targets: T) -> dict[str, T]:
    """The targets, and log-probabilities that a reference had of them."""
    return {"targets": targets, "reference": -0.1 * (targets % 11).double() * (targets != IGNORED)}


def _preference_of_rows(output: Any, stored: dict[str, T], mesh: Any = None) -> T:
    """The sum over a microbatch's pairs."""
    log_probs = token_log_probs(logits_of(output), stored["targets"]) - stored["reference"]
    margins = sequence_sum(log_probs, mesh)
    return -F.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).sum()


@feature(needs={"text", "causal"})
def preference_in_a_step(side: Side) -> None:
    """On any mesh, with stages too: what the reference gave is part of the targets; a microbatch has whole pairs."""
    mesh = None if side.alone else side.mesh
    microbatches = {"num_microbatches": 2} if not side.alone and side.axis.ranks("pp") > 1 else {}
    side.place(
        loss=lambda output, stored: _preference_of_rows(output, stored, mesh),
        count=lambda stored: len(stored["targets"]) // 2,
        **microbatches,
    )
    for number in range(2):
        side.step(number, targets=side.local(_stored_reference(side.kind.batch(number)[1])))
        side.update()
    side.step(2, targets=side.local(_stored_reference(side.kind.batch(2)[1])))
