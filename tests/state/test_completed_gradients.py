"""Gradients reach their parameters when the backward pass ends: once, in full, and none of a pass that failed."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from parallelize.state.pending_reductions import GradientCollector


class Receiver:
    """Adds the leaf's gradient to that of a stand-in for the parameter, and notes when."""

    def __init__(self, events: list[str]):
        self.param, self.events = SimpleNamespace(grad=None), events

    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        self.receive(grad)

    def receive(self, grad: torch.Tensor) -> None:
        self.events.append("delivered")
        self.param.grad = grad if self.param.grad is None else self.param.grad + grad


class Note(torch.autograd.Function):
    """The identity; its backward notes that it ran, or fails."""

    @staticmethod
    def forward(ctx, x, events, fails):
        ctx.events, ctx.fails = events, fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("backward")
        if ctx.fails and ctx.fails.pop():
            raise RuntimeError("no memory")
        return grad, None, None


def leaves(completed: GradientCollector, events: list[str], count: int = 2):
    made = []
    for _ in range(count):
        leaf = torch.ones(3, requires_grad=True)
        leaf.register_post_accumulate_grad_hook(completed.hook(leaf, Receiver(events)))
        made.append(leaf)
    return made


def loss_of(early: torch.Tensor, late: torch.Tensor, events: list[str], fails=None) -> torch.Tensor:
    """In backward `late` is complete before `Note` runs, and `early` after it."""
    hidden = Note.apply(early * 2, events, fails)
    return (hidden * late).sum()


def test_gradients_are_delivered_once_when_the_pass_ends():
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)
    loss_of(early, late, events).backward()
    assert events == ["backward", "delivered", "delivered"]
    assert early.receiver.param.grad.tolist() == [2.0] * 3 and late.receiver.param.grad.tolist() == [2.0] * 3
    assert early.grad is None and late.grad is None


def test_each_pass_records_anew():
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)
    for _ in range(3):
        early.receiver.param.grad = late.receiver.param.grad = None
        loss_of(early, late, events).backward()
        assert late.receiver.param.grad.tolist() == [2.0] * 3
    assert events == ["backward", "delivered", "delivered"] * 3


def test_an_accumulating_pass_adds_at_once():
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)
    loss_of(early, late, events).backward()
    events.clear()
    loss_of(early, late, events).backward()
    assert events == ["delivered", "backward", "delivered"]
    assert late.receiver.param.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("again", ["the same graph", "a new graph"])
def test_a_pass_that_fails_adds_nothing(again):
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)
    loss = loss_of(early, late, events, fails=[True])
    with pytest.raises(RuntimeError, match="no memory"):
        loss.backward(retain_graph=True)
    assert late.grad is None and late.receiver.param.grad is None
    (loss if again == "the same graph" else loss_of(early, late, events)).backward()
    assert late.receiver.param.grad.tolist() == [2.0] * 3 and early.receiver.param.grad.tolist() == [2.0] * 3


def test_a_delivery_that_fails_drops_the_others():
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)

    def refuse(grad):
        raise ValueError("refused")

    stock = late.receiver.__class__
    late.receiver.__class__ = type("Refusing", (Receiver,), {"receive": lambda self, grad: refuse(grad)})
    with pytest.raises(ValueError, match="refused"):
        loss_of(early, late, events).backward()
    assert early.grad is None and late.grad is None and early.receiver.param.grad is None
    late.receiver.__class__ = stock
    loss_of(early, late, events).backward()
    assert early.receiver.param.grad.tolist() == [2.0] * 3


def test_passes_inside_each_other():
    events: list[str] = []
    early, late = leaves(GradientCollector(), events)
    hidden = checkpoint(
        lambda x: Note.apply(x * early, events, None), torch.ones(3, requires_grad=True), use_reentrant=True
    )
    (hidden * late * early).sum().backward()
    assert early.receiver.param.grad.tolist() == [2.0] * 3 and late.receiver.param.grad.tolist() == [1.0] * 3


def test_copies_share_nothing():
    completed = GradientCollector()
    leaves(completed, [])
    assert copy.deepcopy(completed) is not completed
    assert isinstance(pickle.loads(pickle.dumps(completed)), GradientCollector)
