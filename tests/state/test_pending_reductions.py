"""Gradients with a pending reduction are summed in one message, whichever way they reach the end of the pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallelize.state.pending_reductions import PendingReduction, PendingReductions


class CountedGroup:
    """Stands for two ranks with equal gradients, and counts the messages."""

    def __init__(self) -> None:
        self.messages = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        self.messages += 1
        x.mul_(2)


class Receiver:
    def __init__(self, pending: PendingReductions, reduction: PendingReduction):
        self.param, self.pending, self.reduction = SimpleNamespace(grad=None), pending, reduction

    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        self.pending.add(self, self.reduction, grad, immediately=False)

    def receive(self, grad: torch.Tensor) -> None:
        self.pending.collect(self, self.reduction, grad)

    def deliver(self, grad: torch.Tensor) -> None:
        self.param.grad = grad if self.param.grad is None else self.param.grad + grad


def make_leaves(pending: PendingReductions, group: CountedGroup, hooked: tuple[bool, ...]) -> list[torch.Tensor]:
    """Leaves whose gradients are taken by a Python hook, or recorded until the pass ends."""
    leaves = []
    for order, is_hooked in enumerate(hooked):
        leaf = torch.ones(3, requires_grad=True)
        receiver = Receiver(pending, PendingReduction(order, ((group, None, 0, 0),)))
        hook = pending.completed.hook(leaf, receiver)
        leaf.register_post_accumulate_grad_hook(receiver if is_hooked else hook)
        leaves.append(leaf)
    return leaves


@pytest.mark.parametrize("hooked", [(False,) * 3, (True,) * 3, (False, True, False), (True, False, True)])
def test_one_message_a_pass(hooked):
    pending, group = PendingReductions(), CountedGroup()
    leaves = make_leaves(pending, group, hooked)
    for _ in range(2):
        for leaf in leaves:
            leaf.receiver.param.grad = None
        sum((leaf * (index + 1)).sum() for index, leaf in enumerate(leaves)).backward()
        assert [leaf.receiver.param.grad.tolist() for leaf in leaves] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]
    assert group.messages == 2


@pytest.mark.parametrize("hooked", [(False, False), (True, False)])
def test_passes_that_accumulate_send_one_message_together(hooked):
    pending, group = PendingReductions(), CountedGroup()
    leaves = make_leaves(pending, group, hooked)
    with pending.accumulating():
        for _ in range(3):
            sum(leaf.sum() for leaf in leaves).backward()
        assert group.messages == 0
    assert group.messages == 1 and leaves[0].receiver.param.grad.tolist() == [6.0] * 3


def test_nothing_of_a_failed_delivery_is_left_for_the_next_pass():
    pending, group = PendingReductions(), CountedGroup()
    leaves = make_leaves(pending, group, (False, False, False))
    stock = Receiver.receive

    def fail(self: Receiver, grad: torch.Tensor) -> None:
        raise ValueError("refused")

    leaves[1].receiver.__class__ = type("Refusing", (Receiver,), {"receive": fail})
    with pytest.raises(ValueError, match="refused"):
        sum(leaf.sum() for leaf in leaves).backward()
    leaves[1].receiver.__class__ = Receiver
    assert Receiver.receive is stock
    sum(leaf.sum() for leaf in leaves).backward()
    assert [leaf.receiver.param.grad.tolist() for leaf in leaves] == [[2.0] * 3] * 3
