"""Divergences of student and teacher: every form of logits, every layout of the teacher, gradients, no full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelize import HandshakeError, ModelError, ShapeError, build_mesh, distillation_loss, linear_distillation_loss
from parallelize.axes.vocabulary.logits.deferred_logits import defer
from parallelize.axes.vocabulary.logits.forms import Head
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.comm.handshake import InputCheck
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.memory import peak_bytes
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

LEAD, HIDDEN, TEACHER_HIDDEN = (3, 5), 7, 9
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
KINDS = ("forward_kl", "reverse_kl", "jsd")


def example(student_vocab, teacher_vocab, dtype=torch.float64):
    """Hidden states, weights, biases of both; targets with some ignored; weights of tokens."""
    torch.manual_seed(0)
    values = {
        "hidden": torch.randn(*LEAD, HIDDEN, dtype=dtype),
        "weight": torch.randn(student_vocab, HIDDEN, dtype=dtype),
        "bias": torch.randn(student_vocab, dtype=dtype) + 20,
        "teacher_hidden": torch.randn(*LEAD, TEACHER_HIDDEN, dtype=dtype),
        "teacher_weight": torch.randn(teacher_vocab, TEACHER_HIDDEN, dtype=dtype),
        "teacher_bias": torch.randn(teacher_vocab, dtype=dtype) - 3,
    }
    targets = torch.randint(0, 3, LEAD)
    targets[2, 3:] = -100
    return values, targets, torch.rand(LEAD, dtype=dtype) + 0.5


def divergence_of(student, teacher, kind, beta=0.3, temperature=1.0, entries=None):
    """[...], by torch: the formulas as the papers write them."""
    log_q = (student[..., :entries] / temperature).log_softmax(-1)
    log_p = (teacher[..., :entries] / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def reference(values, targets, token_weight, kind, reduction, entries=None, softcap=None, **options):
    """Loss and every gradient of the student on one rank."""
    leaves = {name: values[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    student = F.linear(*leaves.values())
    student = student if softcap is None else softcap * torch.tanh(student / softcap)
    student.retain_grad()
    teacher = F.linear(*(values[f"teacher_{name}"] for name in leaves))
    weights = torch.where(targets == -100, 0, token_weight)
    losses = weights * divergence_of(student, teacher, kind, entries=entries, **options)
    loss = losses if reduction == "none" else losses.sum() / (weights.sum() if reduction == "mean" else 1)
    backward(loss)
    return {"loss": loss.detach(), "logits": student.grad} | {name: leaf.grad for name, leaf in leaves.items()}


def backward(loss):
    """With a gradient of its own for each loss, and not 1."""
    (loss * (torch.arange(loss.numel(), dtype=loss.dtype) + 2).view(loss.shape)).sum().backward()


def local(x, group, dim=0):
    start, stop = even_interval(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, start, stop - start).clone()


def sharded(x, group):
    return mark(local(x, group, -1), Vocabulary(x.shape[-1], group))


def as_dtensor(x, mesh, dim):
    part = local(x, Group(mesh.get_group()), dim)
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=x.shape, stride=x.stride())


CASES = [  # tp, vocabulary, dtype, temperature, reduction
    (1, 11, torch.float64, 0.7, "mean"),
    (2, 11, torch.float64, 2.0, "none"),
    (2, 11, torch.float32, 1.0, "mean"),
    (4, 10, torch.float64, 2.0, "sum"),
    (4, 3, torch.float64, 0.7, "mean"),
]


@pytest.mark.parametrize("form", ["marked", "dtensor", "linear"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "vocab", "dtype", "temperature", "reduction"), CASES)
def test_equals_torch(tp, vocab, dtype, temperature, reduction, kind, form):
    values, targets, token_weight = example(vocab, vocab, dtype)
    exact = {name: value.double() for name, value in values.items()}
    expected = reference(exact, targets, token_weight.double(), kind, reduction, temperature=temperature)
    options = dict(divergence=kind, beta=0.3, temperature=temperature, reduction=reduction)
    options |= dict(targets=targets, token_weight=token_weight)

    def body(rank):
        mesh = build_mesh("cpu", tp=tp)
        group = Group(mesh.get_group())
        teacher = F.linear(*(values[f"teacher_{name}"] for name in ("hidden", "weight", "bias")))
        if form == "linear":
            leaf = values["hidden"].clone().requires_grad_()
            parts = {name: as_dtensor(values[name], mesh, 0) for name in values if not name.endswith("hidden")}
            for name in ("weight", "bias"):
                parts[name].requires_grad_()
            weight, other = parts.pop("weight"), parts.pop("teacher_weight")
            loss = linear_distillation_loss(leaf, weight, values["teacher_hidden"], other, chunk=4, **parts, **options)
            backward(loss)
            result = {"loss": loss.detach(), "hidden": leaf.grad, "weight": weight.grad.full_tensor()}
            return result | {"bias": parts["bias"].grad.full_tensor()}
        logits = F.linear(values["hidden"], values["weight"], values["bias"])
        if form == "dtensor":
            leaf, other = as_dtensor(logits, mesh, 2).requires_grad_(), as_dtensor(teacher, mesh, 2)
            loss = distillation_loss(leaf, other, **options)
        else:
            leaf = local(logits, group, -1).requires_grad_()
            loss = distillation_loss(mark(leaf * 1, Vocabulary(vocab, group)), sharded(teacher, group), **options)
        backward(loss)
        grad = leaf.grad.to_local() if form == "dtensor" else leaf.grad
        return {"loss": loss.detach(), "logits": grad}

    results = run_ranks(tp, body)
    assert all(torch.equal(result["loss"], results[0]["loss"]) for result in results)
    if form != "linear":
        results[0]["logits"] = torch.cat([result["logits"] for result in results], -1)
    assert worst(results[0], {name: expected[name] for name in results[0]})[0] <= BOUND[dtype]


LAYOUTS = ["whole", "other_group", "other_padding", "student_whole", "ranks_without_entries"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("student_form", ["logits", "deferred"])
def test_a_teacher_of_another_layout(student_form, layout, kind):
    """Four ranks; the student's gradient is that of one process, whatever the teacher's shards are."""
    vocab, teacher_vocab, entries = {
        "other_padding": (13, 10, 9),
        "ranks_without_entries": (8, 14, 3),
    }.get(layout, (11, 11, None))
    values, targets, token_weight = example(vocab, teacher_vocab)
    expected = reference(values, targets, token_weight, kind, "mean", entries=entries, softcap=5.0, temperature=0.6)
    options = dict(divergence=kind, beta=0.3, temperature=0.6, targets=targets, token_weight=token_weight)

    def body(rank):
        four, two = Group(build_mesh("cpu", tp=4).get_group()), Group(build_mesh("cpu", dp=2, tp=2)["tp"].get_group())
        group = Group.alone() if layout == "student_whole" else four
        of_teacher = {"whole": Group.alone(), "other_group": two}.get(layout, four)
        with torch.no_grad():
            teacher = F.linear(*(values[f"teacher_{name}"] for name in ("hidden", "weight", "bias")))
            teacher = teacher if layout == "whole" else sharded(teacher, of_teacher)
        leaves = {name: values[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
        weight, bias = (local(leaves[name], group) for name in ("weight", "bias"))
        if student_form == "deferred":
            head = Head(weight, bias, Vocabulary(vocab, group), 4)
            student = defer(leaves["hidden"], head, group.size > 1, (weight,))
        else:
            logits = F.linear(leaves["hidden"], weight, bias)
            student = mark(logits, Vocabulary(vocab, group)) if group.size > 1 else logits
        student = 5.0 * torch.tanh(student / 5.0)  # Gemma 2's softcap, as a stock model writes it
        loss = distillation_loss(student, teacher, vocab_size=entries, **options)
        backward(loss)
        if group.size > 1:
            for leaf in leaves.values():  # each rank has a part of the sum
                group.all_reduce(leaf.grad)
        return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    del expected["logits"]
    for result in run_ranks(4, body):
        assert worst(result, expected)[0] <= 1e-12


def test_a_deferred_teacher_and_a_second_backward():
    values, targets, token_weight = example(11, 11)
    expected = reference(values, targets, token_weight, "jsd", "mean")

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        leaves = {name: values[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
        weight, bias = (local(leaves[name], group) for name in ("weight", "bias"))
        student = defer(leaves["hidden"], Head(weight, bias, Vocabulary(11, group), 4), True, (weight,))
        of_teacher = [local(values[f"teacher_{name}"], group) for name in ("weight", "bias")]
        with torch.inference_mode():  # as an evaluation runs it
            hidden = values["teacher_hidden"] * 1
            teacher = defer(hidden, Head(*of_teacher, Vocabulary(11, group)), True, (of_teacher[0],))
        loss = distillation_loss(
            student, teacher, divergence="jsd", beta=0.3, targets=targets, token_weight=token_weight
        )
        (2 * loss).backward(retain_graph=True)
        first = leaves["hidden"].grad.clone()
        leaves["hidden"].grad = None
        (2 * loss).backward()
        group.all_reduce(first)
        group.all_reduce(leaves["hidden"].grad)
        return {"loss": loss.detach(), "first": first, "second": leaves["hidden"].grad}

    for result in run_ranks(2, body):
        wanted = {"loss": expected["loss"], "first": expected["hidden"], "second": expected["hidden"]}
        assert worst(result, wanted)[0] <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_has_no_part_and_extremes_stay_finite(kind):
    """-inf on both sides is as if the entries were not there; a rank's whole shard may be masked."""
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 4, 6, dtype=torch.float64).unbind(0)
    for logits in (student, teacher):
        logits[:, :3] = -torch.inf
        logits[1] *= 1e3  # probabilities of 0 and 1
    kept = student[:, 3:].clone().requires_grad_()
    expected = distillation_loss(kept, teacher[:, 3:], divergence=kind, reduction="sum")
    expected.backward()
    assert expected.isfinite() and kept.grad.isfinite().all()

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        leaf = local(student, group, -1).requires_grad_()
        loss = distillation_loss(
            mark(leaf * 1, Vocabulary(6, group)), sharded(teacher, group), divergence=kind, reduction="sum"
        )
        loss.backward()
        return loss.detach(), leaf.grad

    (loss, masked), (_, grad) = run_ranks(2, body)
    assert torch.allclose(loss, expected, rtol=1e-12) and (masked == 0).all()
    assert torch.allclose(grad, kept.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_half_precision_are_computed_in_float32(kind):
    """The loss is that of the same numbers in float64; the gradient is rounded once, to the dtype of the logits."""
    torch.manual_seed(2)
    student, teacher = (4 * torch.randn(2, 64, 1000)).bfloat16().unbind(0)
    exact = student.double().requires_grad_()
    expected = divergence_of(exact, teacher.double(), kind, temperature=0.7).mean()
    expected.backward()
    leaf = student.clone().requires_grad_()
    loss = distillation_loss(leaf, teacher, divergence=kind, beta=0.3, temperature=0.7)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(float(loss) - float(expected)) <= 2e-6 * float(expected)
    error = (leaf.grad.double() - exact.grad).abs()
    assert (error <= 2.0**-8 * exact.grad.abs() + 1e-9).all()


def test_heads_in_half_precision_have_the_loss_of_their_logits():
    """Chunk by chunk, from logits that a matmul has rounded; the gradients are rounded as those of matmuls are."""
    values, targets, _ = example(11, 11, torch.bfloat16)
    parts = {name: value.clone().requires_grad_() for name, value in values.items() if "teacher" not in name}
    theirs = [values[f"teacher_{name}"] for name in parts]
    separate = distillation_loss(F.linear(*parts.values()), F.linear(*theirs), targets=targets)
    expected = torch.autograd.grad(separate, list(parts.values()))
    loss = linear_distillation_loss(
        parts["hidden"],
        parts["weight"],
        *theirs[:2],
        bias=parts["bias"],
        teacher_bias=theirs[2],
        targets=targets,
        chunk=4,
    )
    grads = torch.autograd.grad(loss, list(parts.values()))
    assert loss.dtype == torch.float32 and torch.allclose(loss, separate, rtol=1e-5)
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad.dtype == torch.bfloat16 and torch.allclose(grad, wanted, rtol=0.03, atol=0.01)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    logits = torch.randn(5, 9, dtype=torch.float64)
    for kind in KINDS:
        leaf = (logits + 3).requires_grad_()
        loss = distillation_loss(leaf, logits, divergence=kind)
        loss.backward()
        assert abs(float(loss)) <= 1e-15 and leaf.grad.abs().max() <= 1e-15


def test_means_over_data_axes_and_empty_batches():
    values, targets, token_weight = example(11, 11)
    student, teacher = (F.linear(*(values[p + n] for n in ("hidden", "weight", "bias"))) for p in ("", "teacher_"))
    whole = distillation_loss(student, teacher, targets=targets, token_weight=token_weight)

    def body(rank):
        mesh = build_mesh("cpu", dp=3)
        own = slice(rank, rank + 1)
        return distillation_loss(
            student[own], teacher[own], targets=targets[own], token_weight=token_weight[own], mesh=mesh
        )

    assert torch.allclose(sum(run_ranks(3, body)), whole, rtol=1e-12)
    counted = distillation_loss(student, teacher, num_tokens=30)
    assert torch.allclose(counted, distillation_loss(student, teacher, reduction="sum") / 30, rtol=1e-12)
    leaf = student.clone().requires_grad_()
    empty = distillation_loss(leaf, teacher, targets=torch.full(LEAD, -100))
    empty.backward()
    assert empty.isnan() and (leaf.grad == 0).all()
    none = distillation_loss(student[:0], teacher[:0], reduction="sum")
    assert float(none) == 0.0


def test_what_is_sent_does_not_grow_with_the_vocabulary():
    from unittest.mock import patch

    sent = []
    real = Group.all_gather

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        leaf, teacher = torch.randn(2, 6, 500)
        student = mark(leaf.requires_grad_() * 1, Vocabulary(1000, group))
        distillation_loss(student, mark(teacher, Vocabulary(1000, group)), divergence="jsd").backward()

    with patch.object(Group, "all_gather", counted), patch.object(Group, "all_to_all", None):
        run_ranks(2, body)
    assert sorted(sent) == [(2, 6)] * 2 + [(4, 6)] * 2


def test_memory_of_one_chunk_of_both():
    hidden, weight = (torch.empty(rows, 256, device="meta").requires_grad_() for rows in (2048, 32768))
    teacher_hidden, teacher_weight = (torch.empty(rows, 512, device="meta") for rows in (2048, 32768))

    def separate():
        student, teacher = F.linear(hidden, weight), F.linear(teacher_hidden, teacher_weight)
        F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean").backward()

    def fused():
        linear_distillation_loss(hidden, weight, teacher_hidden, teacher_weight).backward()

    def by_token():
        linear_distillation_loss(hidden, weight, teacher_hidden, teacher_weight, reduction="none").sum().backward()

    full = peak_bytes(separate)
    for work in (fused, by_token):
        hidden.grad = weight.grad = None
        assert peak_bytes(work) <= full / 5


def test_a_checkpoint_and_no_grad():
    from torch.utils.checkpoint import checkpoint

    values, targets, token_weight = example(11, 11)
    expected = reference(values, targets, token_weight, "reverse_kl", "mean")
    teacher = F.linear(*(values[f"teacher_{name}"] for name in ("hidden", "weight", "bias")))

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        logits = F.linear(*(values[name] for name in ("hidden", "weight", "bias")))
        leaf = local(logits, group, -1).requires_grad_()

        def loss_of(x):
            return distillation_loss(
                mark(x, Vocabulary(11, group)),
                sharded(teacher, group),
                divergence="reverse_kl",
                targets=targets,
                token_weight=token_weight,
            )

        with torch.no_grad():
            assert not loss_of(leaf * 1).requires_grad
        backward(checkpoint(lambda x: loss_of(x * 1), leaf, use_reentrant=False))
        return leaf.grad

    assert torch.allclose(torch.cat(run_ranks(2, body), -1), expected["logits"], rtol=1e-11, atol=1e-14)


def test_refusals():
    student, teacher = torch.randn(3, 5, 11), torch.randn(3, 5, 11)
    ids, hidden, weight = torch.zeros(3, 5, dtype=torch.long), torch.randn(3, 4), torch.randn(11, 4)
    for call, slug in (
        (lambda: distillation_loss(student, teacher[:2]), "bad-teacher"),
        (lambda: distillation_loss(student, teacher[..., :7]), "other-vocabulary"),
        (lambda: distillation_loss(student, teacher[..., :7], vocab_size=8), "other-vocabulary"),
        (lambda: distillation_loss(student, teacher, vocab_size=0), "other-vocabulary"),
        (lambda: distillation_loss(student, teacher, divergence="kl"), "bad-divergence"),
        (lambda: distillation_loss(student, teacher, divergence="jsd", beta=1.0), "bad-divergence"),
        (lambda: distillation_loss(student, teacher, temperature=0), "bad-temperature"),
        (lambda: distillation_loss(student, teacher, reduction="batchmean"), "bad-reduction"),
        (lambda: distillation_loss(student, teacher, targets=ids[0]), "bad-targets"),
        (lambda: distillation_loss(student, teacher, targets=ids.float()), "bad-targets"),
        (lambda: distillation_loss(student, teacher, token_weight=torch.ones(5)), "bad-token-weight"),
        (lambda: distillation_loss(student, teacher, token_weight=ids.float().requires_grad_()), "bad-token-weight"),
        (lambda: linear_distillation_loss(hidden, weight, hidden, weight[:, :3]), "bad-head"),
        (lambda: linear_distillation_loss(hidden, weight, hidden, weight, chunk=0), "bad-chunk"),
    ):
        with pytest.raises(ShapeError) as error:
            call()
        assert error.value.slugs == (slug,)
    with pytest.raises(ModelError, match="teacher-gradient"):
        distillation_loss(student, teacher.clone().requires_grad_())
    with torch.no_grad():
        distillation_loss(student, teacher.clone().requires_grad_())
    loss = distillation_loss(student.requires_grad_(), teacher)
    teacher /= 2
    with pytest.raises(ModelError, match="teacher-changed"):
        loss.backward()


def test_the_head_that_does_not_fit_is_named():
    hidden, weight = torch.randn(3, 4), torch.randn(11, 4)
    calls = {
        "the student's hidden [3, 4]": lambda: linear_distillation_loss(hidden, weight[:, :3], hidden, weight),
        "the teacher's hidden [3, 4]": lambda: linear_distillation_loss(hidden, weight, hidden, weight[:, :3]),
        "the student's weight: a Linear": lambda: linear_distillation_loss(hidden, nn.Linear(4, 11), hidden, weight),
        "the teacher's hidden states: a tuple": lambda: linear_distillation_loss(hidden, weight, (hidden,), weight),
    }
    for text, call in calls.items():
        with refused(ShapeError, "bad-head", text):
            call()


def test_ranks_that_gather_a_teacher_must_have_the_same_tokens():
    """A teacher over two ranks, each of which has taken other rows of its logits, as of two data ranks."""

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        teacher = mark(torch.randn(3, 4), Vocabulary(8, group, InputCheck(group, 1)))
        with pytest.raises(HandshakeError, match="replicas-differ"):
            distillation_loss(torch.randn(3, 8), teacher, targets=torch.tensor([1, 2, rank]))

    run_ranks(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind):
    torch.manual_seed(3)
    hidden, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    teacher_hidden, teacher_weight = torch.randn(3, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

    def loss_of(hidden, weight):
        return linear_distillation_loss(
            hidden, weight, teacher_hidden, teacher_weight, divergence=kind, temperature=1.3, scale=0.7, softcap=2.0
        )

    assert torch.autograd.gradcheck(loss_of, (hidden.requires_grad_(), weight.requires_grad_()), nondet_tol=1e-13)
