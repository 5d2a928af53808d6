"""Losses, entropies and temperatures at the limits: no valid token, masked logits, large gradients, narrow dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize import cross_entropy, linear_cross_entropy, linear_token_log_probs, token_entropy, token_log_probs
from tests.axes.vocabulary.small_head import HIDDEN, TOKENS, VOCAB, alone
from tests.support.parity import worst


def test_where_no_token_counts_the_loss_is_nan_and_its_gradients_are_zero():
    """As torch has it."""
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    nothing = torch.full((TOKENS,), -100)
    for rows in (slice(0, TOKENS), slice(0, 0)):
        for loss_of in (
            lambda h, t: F.cross_entropy(F.linear(h, weight), t),
            lambda h, t: cross_entropy(F.linear(h, weight), t),
            lambda h, t: linear_cross_entropy(h, weight, t),
            lambda h, t: F.cross_entropy(alone(h, weight), t),
            lambda h, t: linear_cross_entropy(h, weight, t, num_tokens=0),
        ):
            hidden.grad = weight.grad = None
            loss = loss_of(hidden[rows], nothing[rows])
            loss.backward()
            assert loss.isnan() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_entropy_of_masked_logits_under_large_gradients(masked, scale):
    torch.manual_seed(0)
    logits = torch.randn(3, 8)
    logits[:, 2] = masked
    leaf, unmasked = logits.clone().requires_grad_(), logits[:, [0, 1, 3, 4, 5, 6, 7]].double().requires_grad_()
    (token_entropy(leaf) * scale).sum().backward()
    log_p = unmasked.log_softmax(-1)
    (-(log_p.exp() * log_p).sum() * scale).backward()
    assert not leaf.grad[:, 2].any() and worst({"": leaf.grad[:, [0, 1, 3, 4, 5, 6, 7]]}, {"": unmasked.grad})[0] < 5e-6
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    bias = torch.zeros(VOCAB)
    bias[7:] = masked
    ids = torch.zeros(TOKENS, dtype=torch.long)
    _, entropies = linear_token_log_probs(hidden, weight, ids, bias=bias, entropy=True)
    (actual,) = torch.autograd.grad((entropies * scale).sum(), hidden)
    log_p = F.linear(hidden, weight[:7]).log_softmax(-1)
    (expected,) = torch.autograd.grad(-(log_p.exp() * log_p).sum() * scale, hidden)
    assert worst({"": actual}, {"": expected})[0] < 1e-5


def test_a_temperature_divides_in_float32():
    """Narrow logits are what they are; their quotient is not rounded again."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    ids = torch.randint(0, 500, (64,))
    logits = F.linear(hidden, weight)
    expected = (logits.double() / 0.7).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    forms = {
        "whole": lambda: token_log_probs(logits, ids, temperature=0.7),
        "linear": lambda: linear_token_log_probs(hidden, weight, ids, temperature=0.7)[0],
        "deferred": lambda: token_log_probs(alone(hidden, weight), ids, temperature=0.7),
        "widened": lambda: token_log_probs(alone(hidden, weight).float(), ids, temperature=0.7),
    }
    for name, form in forms.items():
        assert (form() - expected).abs().max() < 2e-5, name
    capped = 3 * torch.tanh(logits.double() / 3)
    expected = capped.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    actual = linear_token_log_probs(hidden, weight, ids, softcap=3.0)[0]
    assert (actual - expected).abs().max() < 2e-5
