"""A teacher's most probable entries: found on shards, and a student's loss at those alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from parallelize import (
    ModelError,
    ShapeError,
    build_mesh,
    candidate_log_probs,
    distillation_loss,
    top_k_distillation_loss,
    top_k_log_probs,
)
from parallelize.axes.vocabulary.logits.deferred_logits import defer
from parallelize.axes.vocabulary.logits.forms import Head
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.axes.vocabulary.loss.test_distillation import (
    BOUND,
    KINDS,
    LEAD,
    backward,
    divergence_of,
    example,
    local,
    sharded,
)
from tests.support.parity import worst
from tests.support.threads import run_ranks

K = 4


def both(values):
    student, teacher = (F.linear(*(values[p + n] for n in ("hidden", "weight", "bias"))) for p in ("", "teacher_"))
    return student, teacher


def log_classes(logits, ids, tail, temperature, entries=None):
    """[..., k], or [..., k + 1]: log-probabilities of the classes that the loss compares, by torch."""
    log_probs = (logits[..., :entries] / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, ids)
    if not tail:
        return chosen.log_softmax(-1)
    others = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((chosen, others), -1)


@pytest.mark.parametrize("form", ["logits", "deferred"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tp", "vocab", "dtype", "entries"),
    [(1, 11, torch.float64, None), (2, 11, torch.float64, 7), (2, 11, torch.float32, None), (4, 10, torch.float64, 5)],
)
def test_the_loss_of_the_classes(tp, vocab, dtype, entries, kind, tail, form):
    values, targets, token_weight = example(vocab, vocab, dtype)
    exact = {name: value.double() for name, value in values.items()}
    leaves = {name: exact[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    student, (_, teacher) = F.linear(*leaves.values()), both(exact)
    ids = teacher[..., :entries].topk(K).indices
    student_classes, teacher_classes = (log_classes(x, ids, tail, 0.7, entries) for x in (student, teacher))
    weights = torch.where(targets == -100, 0, token_weight.double())
    loss = (weights * divergence_of(student_classes, teacher_classes, kind)).sum() / weights.sum()
    backward(loss)
    expected = {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    def body(rank):
        group = Group(build_mesh("cpu", tp=tp).get_group())
        own = {name: values[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
        weight, bias = (local(own[name], group) for name in ("weight", "bias"))
        if form == "deferred":
            logits = defer(own["hidden"], Head(weight, bias, Vocabulary(vocab, group), 4), True, (weight,))
        else:
            logits = mark(F.linear(own["hidden"], weight, bias), Vocabulary(vocab, group))
        teacher_entries = top_k_log_probs(
            sharded(both(values)[1], group), K, tail=tail, temperature=0.7, vocab_size=entries
        )
        loss = top_k_distillation_loss(
            logits,
            *teacher_entries,
            tail=tail,
            divergence=kind,
            beta=0.3,
            temperature=0.7,
            targets=targets,
            token_weight=token_weight,
            vocab_size=entries,
        )
        backward(loss)
        for leaf in own.values():
            if tp > 1:
                group.all_reduce(leaf.grad)
        return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in own.items()}

    for result in run_ranks(tp, body):
        assert worst(result, expected)[0] <= BOUND[dtype]


@pytest.mark.parametrize(("tp", "vocab"), [(1, 11), (2, 11), (4, 10), (4, 3)])
def test_the_entries_are_those_of_torch(tp, vocab):
    torch.manual_seed(4)
    logits = torch.randn(*LEAD, vocab)
    logits[0, 0, 1] = logits[0, 0, 2] = 9.0  # equal ones: the lowest ids first
    for k in {1, min(K, vocab), vocab}:
        expected, ids = (logits / 0.6).log_softmax(-1).sort(dim=-1, descending=True, stable=True)

        def body(rank, k=k):
            group = Group(build_mesh("cpu", tp=tp).get_group())
            return top_k_log_probs(sharded(logits, group), k, temperature=0.6)

        for entry_ids, values in run_ranks(tp, body):
            assert torch.equal(entry_ids, ids[..., :k])
            assert torch.allclose(values, expected[..., :k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_log_probabilities_of_candidates_and_absent_ones(tp):
    values, _, _ = example(11, 11)
    student, _ = both(values)
    ids = torch.stack([torch.randperm(11)[:K] for _ in range(15)]).view(*LEAD, K)
    ids[0, 1, 2:] = -100
    reference = student.clone().requires_grad_()
    expected = (reference / 1.3).log_softmax(-1).gather(-1, ids.clamp(min=0)).masked_fill(ids == -100, 0.0)
    backward(expected)

    def body(rank):
        group = Group(build_mesh("cpu", tp=tp).get_group())
        leaf = local(student, group, -1).requires_grad_()
        log_probs = candidate_log_probs(mark(leaf * 1, Vocabulary(11, group)), ids, temperature=1.3)
        backward(log_probs)
        return log_probs.detach(), leaf.grad

    results = run_ranks(tp, body)
    assert torch.allclose(results[0][0], expected, rtol=1e-12)
    assert torch.allclose(torch.cat([grad for _, grad in results], -1), reference.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("tail", [True, False])
def test_absent_entries_are_as_if_they_were_not_given(tail):
    values, _, _ = example(11, 11)
    student, teacher = both(values)
    ids, log_probs = top_k_log_probs(teacher, K)
    fewer, padded_ids, padded = ids[..., : K - 1], ids.clone(), log_probs.clone()
    padded_ids[..., -1] = -100
    padded[..., -1] = 7.0  # not read
    padded_ids[1] = -100  # positions without any
    leaves = [student.clone().requires_grad_() for _ in range(2)]
    short = top_k_distillation_loss(leaves[0][[0, 2]], fewer[[0, 2]], log_probs[[0, 2], :, : K - 1], tail=tail)
    long = top_k_distillation_loss(leaves[1], padded_ids, padded, tail=tail)
    short.backward()
    long.backward()
    assert torch.allclose(short, long, rtol=1e-12)
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_all_entries_are_the_whole_loss(kind):
    """With k = V nothing is left for the tail, which has probability 0 on both sides."""
    values, _, _ = example(11, 11)
    student, teacher = both(values)
    leaves = [student.clone().requires_grad_() for _ in range(2)]
    teacher_entries = top_k_log_probs(teacher, 11)
    for tail in (True, False):
        whole = distillation_loss(leaves[0], teacher, divergence=kind)
        part = top_k_distillation_loss(leaves[1], *teacher_entries, tail=tail, divergence=kind)
        (a,), (b,) = torch.autograd.grad(whole, leaves[:1]), torch.autograd.grad(part, leaves[1:])
        assert torch.allclose(whole, part, rtol=1e-9) and torch.allclose(a, b, rtol=1e-8, atol=1e-12)


def test_a_small_tail_is_not_rounded_away():
    """1 minus the mass of the chosen is 0 in float32; the others are summed by themselves."""
    logits = torch.tensor([[30.0, 29.0, 0.0, 1.0]]).requires_grad_()
    ids = torch.tensor([[0, 1]])
    teacher = (torch.tensor([[0.5, 0.25]])).log()
    loss = top_k_distillation_loss(logits, ids, teacher)
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    expected = divergence_of(log_classes(exact, ids, True, 1.0), torch.tensor([[0.5, 0.25, 0.25]]).log(), "forward_kl")
    expected.backward()
    assert torch.allclose(loss.double(), expected, rtol=1e-6)
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=1e-5)


def test_a_tail_that_was_not_given_is_what_is_left():
    """It is never 0, as a sum of rounded numbers may tell: the reverse divergence from 0 is infinite."""
    values, _, _ = example(11, 11, torch.float32)
    student, teacher = both(values)
    for kind in KINDS:
        ids, with_tail = top_k_log_probs(teacher, 8, tail=True)
        given_rest, computed_rest = (
            top_k_distillation_loss(student, ids, log_probs, divergence=kind, reduction="none")
            for log_probs in (with_tail, with_tail[..., :8])
        )
        has_rest = with_tail[..., 8].exp() > 1e-3
        assert has_rest.any() and torch.allclose(given_rest[has_rest], computed_rest[has_rest], rtol=1e-2)
        sure = torch.tensor([[-1e-9, -20.0]]).bfloat16()
        assert top_k_distillation_loss(student[0, :1], ids[0, :1, :2], sure, divergence=kind).isfinite()


def test_what_is_sent_is_of_k():
    sent = []
    real = Group.all_gather

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        teacher, leaf = torch.randn(2, 6, 500).unbind(0)
        teacher_entries = top_k_log_probs(mark(teacher, Vocabulary(1000, group)), K)
        top_k_distillation_loss(
            mark(leaf.clone().requires_grad_() * 1, Vocabulary(1000, group)), *teacher_entries
        ).backward()

    with patch.object(Group, "all_gather", counted):
        run_ranks(2, body)
    assert sorted(sent) == sorted([(2, 6, K), (6, K + 2), (6, K + 4)] * 2)


def test_refusals():
    logits, ids = torch.randn(3, 11), torch.arange(K).expand(3, K)
    log_probs = torch.full((3, K), 0.2).log()
    for call, slug in (
        (lambda: top_k_log_probs(logits, 0), "bad-top-k"),
        (lambda: top_k_log_probs(logits, 12), "bad-top-k"),
        (lambda: top_k_log_probs(logits, 8, vocab_size=7), "bad-top-k"),
        (lambda: top_k_log_probs(logits, 3, vocab_size=12), "other-vocabulary"),
        (lambda: candidate_log_probs(logits, ids[:2]), "bad-targets"),
        (lambda: candidate_log_probs(logits, ids.float()), "bad-targets"),
        (lambda: candidate_log_probs(logits, ids * 0), "bad-targets"),
        (lambda: candidate_log_probs(logits, ids + 9), "id-out-of-range"),
        (lambda: candidate_log_probs(logits, ids, vocab_size=2), "id-out-of-range"),
        (lambda: candidate_log_probs(logits, ids, temperature=-1), "bad-temperature"),
        (lambda: top_k_distillation_loss(logits, ids, log_probs[:, :2]), "bad-teacher"),
        (lambda: top_k_distillation_loss(logits, ids, log_probs + 3), "bad-teacher"),
        (lambda: top_k_distillation_loss(logits, ids, log_probs, divergence="kl"), "bad-divergence"),
    ):
        with pytest.raises(ShapeError) as error:
            call()
        assert error.value.slugs == (slug,)
    top_k_distillation_loss(logits, ids, log_probs + 3, tail=False)
    for call in (
        lambda: top_k_log_probs(logits.requires_grad_(), 3),
        lambda: top_k_distillation_loss(logits, ids, log_probs.requires_grad_()),
    ):
        with pytest.raises(ModelError, match="teacher-gradient"):
            call()
