"""A small model with a head, planned over two ranks, for tests of deferred and sharded logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import DeferredLogits, build_mesh, parallelize_module
from parallelize.axes.vocabulary.logits.deferred_logits import defer
from parallelize.axes.vocabulary.logits.forms import Head
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.plan.choose import plan_of
from tests.support.threads import run_ranks

TOKENS, HIDDEN, VOCAB = 9, 6, 11


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, x):
        return self.head(self.first(x))


def small(seed: int = 0) -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return Net().double(), torch.randn(TOKENS, 5, dtype=torch.float64), torch.randint(0, VOCAB, (TOKENS,))


def planned(net: Net, **options) -> Net:
    plan = plan_of(net, {"first": "replicate", "head": "colwise(output=vocabulary)"})
    return parallelize_module(net, build_mesh("cpu", tp=2), plan, **{"fuse_loss": True, **options})


def on_two(net: Net, body, **options):
    """`body(planned copy of net)` on two ranks."""
    nets = [copy.deepcopy(net) for _ in range(2)]
    return run_ranks(2, lambda rank: body(planned(nets[rank], **options)))


def alone(hidden: torch.Tensor, weight: torch.Tensor) -> DeferredLogits:
    return defer(hidden, Head(weight, None, Vocabulary(len(weight), Group.alone())), False, (weight,))


def slug_of(error_type, call) -> str:
    with pytest.raises(error_type) as error:
        call()
    return error.value.slugs[0]
