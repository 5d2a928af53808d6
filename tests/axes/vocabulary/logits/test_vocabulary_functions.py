"""Losses as one process writes them, on logits that are sharded: right, with their gradients, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, build_mesh, cross_entropy, parallelize_model
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.axes.vocabulary.small_head import alone, slug_of, small
from tests.support.threads import run_ranks

SHAPE = (3, 4, 11)
IDS = torch.arange(12).view(3, 4) % 11
MASK = IDS > 3


def generalized_jsd(student, teacher, beta=0.3, temperature=0.9):
    """As trainers for distillation write it, with a mixture by a logsumexp of two."""
    log_q, log_p = ((x / temperature).log_softmax(dim=-1) for x in (student, teacher))
    weight = torch.tensor(beta, dtype=torch.float64)
    mixture = torch.logsumexp(torch.stack([log_q + torch.log1p(-weight), log_p + torch.log(weight)]), dim=0)
    parts = [F.kl_div(mixture, side, reduction="none", log_target=True) for side in (log_p, log_q)]
    divergence = beta * parts[0] + (1 - beta) * parts[1]
    return divergence[MASK].sum() / MASK.sum()


def selective_log_softmax(logits, ids):
    """As trainers for preferences write it, row by row."""
    chosen = torch.gather(logits, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


IDIOMS: dict[str, Callable] = {
    "kl_div, batchmean": lambda s, t: F.kl_div(F.log_softmax(s / 2, -1), F.softmax(t / 2, -1), reduction="batchmean"),
    "kl_div, sum": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum"),
    "kl_div, mean": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="mean"),
    "kl_div, none": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1),
    "kl_div of logs": lambda s, t: F.kl_div(s.log_softmax(2), t.log_softmax(2), reduction="sum", log_target=True),
    "nn.KLDivLoss": lambda s, t: nn.KLDivLoss(reduction="batchmean")(nn.LogSoftmax(-1)(s), nn.Softmax(dim=-1)(t)),
    "generalized_jsd": generalized_jsd,
    "reverse": lambda s, t: (s.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1),
    "probabilities": lambda s, t: (t.softmax(-1) * (t.softmax(-1).log() - s.softmax(-1).log())).sum(
        dim=-1, keepdim=True
    ),
    "gather": lambda s, t: s.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1),
    "gather k": lambda s, t: torch.gather(s.log_softmax(-1), 2, torch.stack((IDS, (IDS + 5) % 11), -1)),
    "gather few": lambda s, t: s.gather(-1, IDS[:2, :3].unsqueeze(-1)),
    "selective_log_softmax": lambda s, t: selective_log_softmax(s, IDS),
    "logsumexp": lambda s, t: torch.logsumexp(s, -1) * s.logsumexp(dim=(1, -1), keepdim=True).sum(),
    "entropy": lambda s, t: -(s.softmax(-1) * s.log_softmax(-1)).sum(-1),
    "entropy by logsumexp": lambda s, t: s.logsumexp(-1) - (s.softmax(-1) * s).sum(-1),
    "squared difference": lambda s, t: (s - t).square().mean(),
    "mean of the vocabulary": lambda s, t: (s * t).mean(-1) + s.sum((0, 2), keepdim=True).squeeze(-1),
    "mean of tokens": lambda s, t: (s.mean(1) - t.mean(dim=1)).softmax(-1).square().sum(-1),
    "softmax of tokens": lambda s, t: (s.softmax(0) * t.logsumexp(0)).sum(),
    "masked": lambda s, t: (s.log_softmax(-1) * t).masked_fill(~MASK.unsqueeze(-1), 0.0).sum(),
    "mixture of probabilities": lambda s, t: torch.logaddexp(s.log_softmax(-1), t.log_softmax(-1)).exp().square().sum(),
}


def of_ranks(tp: int, body: Callable, *full: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the value on one process of `body` on each rank's shards, gradients of the full tensors)."""

    def run(rank):
        vocabulary = Vocabulary(full[0].shape[-1], Group(build_mesh("cpu", tp=tp).get_group()))
        leaves = [x[..., slice(*even_interval(x.shape[-1], tp, rank))].clone().requires_grad_() for x in full]
        out = body(*(mark(leaf * 1, vocabulary) for leaf in leaves))
        scalar(out).backward()
        return out.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    results = run_ranks(tp, run)
    assert all(type(out) is torch.Tensor and torch.equal(out, results[0][0]) for out, _ in results)
    return results[0][0], [torch.cat(parts, -1) for parts in zip(*(grads for _, grads in results), strict=True)]


def scalar(out: torch.Tensor) -> torch.Tensor:
    """With a gradient of its own for each number."""
    return (out * (torch.arange(out.numel(), dtype=out.dtype) + 2).view(out.shape)).sum()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", IDIOMS)
def test_right_with_its_gradient(name, tp):
    torch.manual_seed(0)
    student, teacher = (torch.randn(SHAPE, dtype=torch.float64) * 2 for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (student, teacher)]
    expected = IDIOMS[name](*leaves)
    scalar(expected).backward()
    out, grads = of_ranks(tp, IDIOMS[name], student, teacher)
    assert out.shape == expected.shape and torch.allclose(out, expected, rtol=1e-12, atol=1e-13)
    for grad, leaf in zip(grads, leaves, strict=True):
        wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert torch.allclose(grad, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["kl_div, batchmean", "gather", "logsumexp", "entropy"])
def test_more_ranks_than_entries_and_masked_shards(name):
    torch.manual_seed(1)
    logits = torch.randn(3, 4, 3, dtype=torch.float64)
    global IDS
    before, IDS = IDS, IDS % 3
    try:
        leaf = logits.clone().requires_grad_()
        expected = IDIOMS[name](leaf, logits)
        scalar(expected).backward()
        out, grads = of_ranks(4, lambda s: IDIOMS[name](s, s.detach()), logits)
    finally:
        IDS = before
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-13)
    assert torch.allclose(grads[0], leaf.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_pytorch(dtype):
    """Sums are in float32 at least, and rounded once."""
    torch.manual_seed(2)
    logits = (torch.randn(SHAPE) * 3).to(dtype)
    calls = {
        "log_softmax": lambda x: x.log_softmax(-1),
        "in float32": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
        "softmax": lambda x: torch.softmax(x, -1),
        "in float64": lambda x: x.softmax(-1, dtype=torch.float64),
        "logsumexp": lambda x: x.logsumexp(-1),
        "sum": lambda x: x.sum(-1),
        "wide sum": lambda x: x.sum(-1, dtype=torch.float64),
        "count": lambda x: x.isfinite().sum(),
    }

    def body(rank):
        vocabulary = Vocabulary(11, Group(build_mesh("cpu", tp=2).get_group()))
        sharded = mark(logits[..., vocabulary.start : vocabulary.stop], vocabulary)
        outs = {name: call(sharded) for name, call in calls.items()}
        return {name: out.full_tensor() if hasattr(out, "full_tensor") else out for name, out in outs.items()}

    for name, out in run_ranks(2, body)[0].items():
        assert out.dtype == calls[name](logits).dtype, name
        assert torch.allclose(
            out.double(), calls[name](logits.double()).double(), rtol=torch.finfo(dtype).eps, atol=1e-6
        ), name


def test_other_operands_of_kl_div_and_cross_entropy():
    """A full side is cut, with its gradient; probabilities that are sharded are targets of a cross entropy."""
    torch.manual_seed(3)
    student, teacher = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (student, teacher)]
    expected = F.kl_div(leaves[0].log_softmax(-1), leaves[1].softmax(-1), reduction="batchmean")
    expected.backward()
    entropy = F.cross_entropy(student.flatten(0, 1), teacher.softmax(-1).flatten(0, 1))

    def body(rank):
        vocabulary = Vocabulary(11, Group(build_mesh("cpu", tp=2).get_group()))
        cut = slice(vocabulary.start, vocabulary.stop)
        leaf, whole = student[..., cut].clone().requires_grad_(), teacher.clone().requires_grad_()
        loss = F.kl_div(mark(leaf * 1, vocabulary).log_softmax(-1), whole.softmax(-1), reduction="batchmean")
        loss.backward()
        with torch.no_grad():
            wanted = mark(teacher[..., cut], vocabulary).softmax(-1)
            sharded = mark(student[..., cut], vocabulary)
            soft = F.cross_entropy(sharded.flatten(0, 1), wanted.flatten(0, 1)), cross_entropy(sharded, wanted)
        return loss.detach(), whole.grad, leaf.grad, soft

    results = run_ranks(2, body)
    for loss, whole, _, soft in results:
        assert torch.allclose(loss, expected, rtol=1e-12) and torch.allclose(whole, leaves[1].grad, rtol=1e-11)
        assert all(torch.allclose(value, entropy, rtol=1e-12) for value in soft)
    assert torch.allclose(torch.cat([leaf for _, _, leaf, _ in results], -1), leaves[0].grad, rtol=1e-11, atol=1e-14)


def test_two_layouts_are_refused_and_what_has_no_meaning_on_a_shard():
    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        logits = mark(torch.randn(3, 6), Vocabulary(11, group) if rank else Vocabulary(12, group))
        other = mark(torch.randn(3, 6), Vocabulary(6, Group.alone()))
        for call in (
            lambda: logits - other,
            lambda: F.kl_div(logits, other, reduction="sum"),
            lambda: F.kl_div(logits, torch.zeros(3, 6), reduction="sum"),  # a shard that nothing tells from one
            lambda: F.cross_entropy(logits, other),
            lambda: cross_entropy(logits, other),
            lambda: F.softmax(logits),
            lambda: logits.gather(0, torch.zeros(1, 6, dtype=torch.long)),
            lambda: F.kl_div(logits, logits, size_average=True),
            lambda: logits.argmax(-1),
        ):
            assert slug_of(ModelError, call) == "sharded-logits"

    run_ranks(2, body)


def test_a_mean_of_one_rank_is_refused_over_data_axes():
    net, x, _ = small()
    nets = [copy.deepcopy(net) for _ in range(4)]

    def body(rank):
        plan = {"first": "replicate", "head": "colwise(output=vocabulary)"}
        model = parallelize_model(nets[rank], build_mesh("cpu", dp=2, tp=2), plan, loss_parallel=True).module
        for reduction in ("mean", "batchmean"):
            log_q = model(x).log_softmax(-1)
            loss = F.kl_div(log_q, log_q.detach(), reduction=reduction, log_target=True)
            assert slug_of(ModelError, loss.backward) == "mean-of-rank"

    run_ranks(4, body)


def test_deferred_logits_name_what_to_call():
    hidden, weight = torch.randn(5, 4).requires_grad_(), torch.randn(7, 4)
    for call in IDIOMS["gather"], IDIOMS["kl_div, sum"], IDIOMS["logsumexp"]:
        with pytest.raises(ModelError, match=r"deferred-logits.*\n.*distillation_loss"):
            call(alone(hidden, weight), torch.randn(5, 7))
    with torch.no_grad():
        assert torch.equal(alone(hidden, weight).softmax(-1), F.linear(hidden, weight).softmax(-1))
