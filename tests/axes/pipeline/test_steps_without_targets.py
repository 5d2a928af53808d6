"""A sum over no token has a gradient of zeros; the matrix has the steps without targets."""

from __future__ import annotations

import torch

from parallelize import linear_cross_entropy

NONE = torch.full((6,), -100)


def test_a_sum_over_no_token_has_no_gradient_however_it_is_scaled():
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 10))
    loss = linear_cross_entropy(hidden, weight, NONE, reduction="sum", z_loss=0.1) / 0
    for _ in range(2):  # the second recomputes the logits
        hidden.grad = weight.grad = None
        loss.backward(retain_graph=True)
        assert not hidden.grad.any() and not weight.grad.any()
