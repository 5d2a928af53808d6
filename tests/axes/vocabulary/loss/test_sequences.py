"""Log-probabilities of sequences whose tokens are on several ranks over cp: the value and gradient of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, sequence_log_probs, sequence_sum
from parallelize.axes.vocabulary.loss.sequences import counted_by_rank
from tests.support.threads import run_ranks

ROWS, LENGTH, VOCAB = 4, 6, 7


def example():
    torch.manual_seed(0)
    logits = torch.randn(ROWS, LENGTH, VOCAB, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (ROWS, LENGTH))
    targets[0, :4] = -100  # more on one rank than on the other
    targets[3] = -100
    return logits, targets


def alone(logits, targets, average):
    log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    valid = targets != -100
    total = (log_probs * valid).sum(1)
    return total / valid.sum(1).clamp(min=1) if average else total


def preference(sums):
    return -F.logsigmoid(sums[0::2] - sums[1::2]).sum() / 2


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sizes", [{"cp": 3}, {"dp": 3}, {"tp": 2}])
def test_the_formula_of_one_process(sizes, average):
    logits, targets = example()
    leaf = logits.clone().requires_grad_()
    expected = alone(leaf, targets, average)
    preference(expected).backward()
    ((name, ranks),) = sizes.items()

    def body(rank):
        mesh = build_mesh("cpu", **sizes)
        own = slice(rank * 2, rank * 2 + 2) if name == "cp" else slice(None)
        part = logits[:, own].clone().requires_grad_()
        sums = sequence_log_probs(part, targets[:, own], mesh, average=average)
        preference(sums).backward()
        return sums.detach(), part.grad

    results = run_ranks(ranks, body)
    assert all(torch.allclose(sums, expected, rtol=1e-12, atol=1e-14) for sums, _ in results)
    grads = [grad for _, grad in results]
    grad = torch.cat(grads, 1) if name == "cp" else grads[0]
    assert torch.allclose(grad, leaf.grad, rtol=1e-12, atol=1e-14)


def test_in_a_step_the_gradient_counts_as_often_as_the_sequences_do():
    logits, targets = example()

    def body(rank):
        mesh = build_mesh("cpu", cp=2)
        own = slice(rank * 3, rank * 3 + 3)
        grads = []
        for counting in (False, True):
            part = logits[:, own].clone().requires_grad_()
            if counting:
                with counted_by_rank():
                    sums = sequence_log_probs(part, targets[:, own], mesh)
            else:
                sums = sequence_log_probs(part, targets[:, own], mesh)
            preference(sums).backward()
            grads.append(part.grad)
        return torch.allclose(grads[1], 2 * grads[0], rtol=1e-12)

    assert run_ranks(2, body) == [True, True]


def test_without_a_mesh_a_rank_has_whole_sequences():
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(sequence_sum(values, None), torch.tensor([3.0, 12.0]))
    logits, targets = example()
    assert torch.allclose(sequence_log_probs(logits, targets, None), alone(logits, targets, False), rtol=1e-12)
