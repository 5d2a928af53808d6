"""dgrad and then wgrad give the gradients of one backward, also for weights that are used twice or in other
branches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import ModelError
from parallelize.axes.pipeline.split_backward import backward_inputs
from parallelize.base.torch_private import torch_tensors as private


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.gain, self.free = nn.Parameter(torch.ones(5)), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.b(torch.relu(self.a(x)))) * torch.tanh(self.gain)
        return self.b(torch.relu(self.a(h))), self.free(torch.ones(2, 3, dtype=x.dtype))


def test_dgrad_and_wgrad_equal_one_backward():
    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    outs = net(x)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    expected, expected_x = {n: p.grad.clone() for n, p in net.named_parameters()}, x.grad.clone()
    net.zero_grad()
    x.grad = None
    fired: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    wgrad = backward_inputs(net(x), grads, [x])
    assert torch.equal(x.grad, expected_x) and not fired
    wgrad()
    assert sorted(fired) == sorted(expected)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-13, atol=1e-13)


def test_the_order_of_weights_is_the_graphs():
    """All ranks must run wgrad in one order, whatever the addresses of their nodes are."""
    orders = set()
    for _ in range(5):
        keep = [object() for _ in range(1000)]
        net, x = Net().double(), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        fired: list[str] = []
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, fired=fired: fired.append(name))
        outs = net(x)
        backward_inputs(outs, [torch.ones_like(out) for out in outs], [x])()
        orders.add(tuple(fired))
        del keep
    assert len(orders) == 1


def test_a_node_at_which_this_torch_cannot_begin_is_refused_before_anything_runs(monkeypatch):
    """As on torch 2.12 with the Functions of a fused loss and of overlapped linears."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, grad * x

    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    backward_inputs([Scale.apply(x, weight)], [torch.ones(3)], [x])()
    assert torch.equal(weight.grad, torch.ones(3))
    monkeypatch.setattr(private, "at_least", lambda *numbers: False)
    x.grad = None
    with pytest.raises(ModelError) as caught:
        backward_inputs([Scale.apply(x, weight)], [torch.ones(3)], [x])
    assert caught.value.slugs == ("split-backward",) and "ScaleBackward" in str(caught.value) and x.grad is None
