"""Code that splits, joins and reorders tokens, and asks for sizes, works on sharded and deferred logits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, ShardedLogits, full_gradients
from tests.axes.vocabulary.small_head import VOCAB, on_two, small
from tests.support.parity import worst

BATCH, LENGTH, WIDTH = 2, 3, 5
TARGETS = torch.tensor([[1, 4, -100], [0, 6, 2]])
SOFT = torch.rand(BATCH, LENGTH, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FUSED, SHARDED = {"fuse_loss": True, "loss_parallel": True}, {"fuse_loss": False, "loss_parallel": True}


def inputs() -> tuple[nn.Module, torch.Tensor]:
    net, _, _ = small()
    return net, torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LOSSES = {
    "transpose": lambda z: F.cross_entropy(z.transpose(1, 2), TARGETS),
    "permute": lambda z: nn.CrossEntropyLoss(reduction="sum")(z.permute(0, 2, 1), TARGETS),
    "movedim": lambda z: F.cross_entropy(z.double().movedim(-1, 1), TARGETS.clamp(min=0), ignore_index=4),
    "mT": lambda z: F.cross_entropy(input=z.mT.contiguous(), target=TARGETS, label_smoothing=0.1),
    "soft": lambda z: F.cross_entropy(z.swapaxes(1, 2), SOFT.movedim(-1, 1)),
    "positional weight": lambda z: F.cross_entropy(z.transpose(-1, -2), TARGETS, torch.arange(1.0, VOCAB + 1).double()),
    "there and back": lambda z: F.cross_entropy(z.transpose(1, 2).transpose(1, 2).flatten(0, 1), TARGETS.flatten()),
    "two dims": lambda z: F.cross_entropy(z.unsqueeze(1).movedim(-1, 1), TARGETS.unsqueeze(1)),
    "batch second": lambda z: F.cross_entropy(z.transpose(0, 1).reshape(-1, VOCAB), TARGETS.T.flatten()),
    "chunk": lambda z: sum(F.cross_entropy(c[0], t[0]) for c, t in zip(z.chunk(2), TARGETS.chunk(2), strict=True)),
    "split": lambda z: F.cross_entropy(z.split([1, 2], 1)[1].flatten(0, 1), TARGETS[:, 1:].flatten()),
    "unbind": lambda z: F.cross_entropy(z.unbind(1)[0], TARGETS[:, 0]) + F.cross_entropy(z.unbind()[1], TARGETS[1]),
    "iteration": lambda z: sum(F.cross_entropy(row, target) for row, target in zip(z, TARGETS, strict=True)),
    "select": lambda z: F.cross_entropy(z.select(1, 1), TARGETS[:, 1]),
    "narrow": lambda z: F.cross_entropy(z.narrow(1, 0, 2).flatten(0, 1), TARGETS[:, :2].flatten()),
    "rows": lambda z: F.cross_entropy(z.index_select(0, torch.tensor([1, 1])).flatten(0, 1), TARGETS[[1, 1]].flatten()),
    "squeeze": lambda z: F.cross_entropy(z[:1].squeeze(0), TARGETS[0]) + F.cross_entropy(z[:1].squeeze(), TARGETS[0]),
    "unsqueeze": lambda z: F.cross_entropy(z[0].unsqueeze(0).view_as(torch.empty(3, VOCAB)), TARGETS[0]),
    "expand": lambda z: F.cross_entropy(z[:1].expand(2, -1, -1).flatten(0, 1), TARGETS.flatten()),
}
JOINED = {
    "cat": lambda z: F.cross_entropy(
        torch.cat([z[:, :2], z], dim=1).flatten(0, 1), TARGETS[:, [0, 1, 0, 1, 2]].flatten()
    ),
    "stack": lambda z: F.cross_entropy(torch.stack([z[0], z[1]]).flatten(0, 1), TARGETS.flatten()),
}


@pytest.mark.parametrize("options", [SHARDED, FUSED], ids=["sharded", "deferred"])
def test_losses_of_reordered_tokens(options):
    net, x = inputs()
    losses = LOSSES if options is FUSED else LOSSES | JOINED
    expected = {}
    for name, loss_of in losses.items():
        net.zero_grad()
        loss = loss_of(net(x))
        loss.backward()
        expected[name] = float(loss), {key: p.grad.clone() for key, p in net.named_parameters()}

    def body(ours):
        results = {}
        for name, loss_of in losses.items():
            ours.zero_grad()
            loss = loss_of(ours(x))
            loss.backward()
            results[name] = float(loss), full_gradients(ours)
        return results

    for results in on_two(net, body, **options):
        for name, (loss, gradients) in results.items():
            assert loss == pytest.approx(expected[name][0], abs=1e-12), name
            assert worst(gradients, expected[name][1])[0] < 1e-11, name


@pytest.mark.parametrize("options", [SHARDED, FUSED], ids=["sharded", "deferred"])
def test_sizes_are_those_of_the_full_logits(options):
    net, x = inputs()
    full = net(x)

    def body(ours):
        z = ours(x)
        assert (len(z), z.nbytes, z.itemsize, torch.numel(z)) == (len(full), full.nbytes, 8, full.numel())
        first = z.transpose(1, 2)
        assert (first.shape, first.size(1), first.dim()) == ((BATCH, VOCAB, LENGTH), VOCAB, 3)
        assert first.dtype == torch.float64 and first.requires_grad and first.numel() == full.numel()

    on_two(net, body, **options)


def test_finiteness_is_known_on_every_rank():
    net, x = inputs()

    def body(ours):
        z = ours(x)
        assert bool(z.isfinite().all()) and bool(torch.isfinite(z).all()) and not bool(torch.isnan(z).any())
        spoiled = z.with_local(z.to_local().clone())
        if spoiled.vocabulary.group.rank:
            spoiled.to_local().detach()[0, 0, 0] = torch.inf
        return bool(spoiled.isfinite().all()), bool(spoiled.isinf().any()), bool(spoiled.isnan().any())

    assert on_two(net, body, **SHARDED) == [(False, True, False)] * 2


def test_copies_and_texts():
    net, x = inputs()

    def body(ours):
        z = ours(x)
        with torch.no_grad():
            copied, twice = copy.deepcopy([z.detach()] * 2)
        assert copied is twice and isinstance(copied, ShardedLogits)
        assert torch.equal(copied.full_tensor(), z.full_tensor()) and f"{z}" == repr(z)
        with pytest.raises(RuntimeError, match="deepcopy"):  # as of any tensor with a graph
            copy.deepcopy(z)

    on_two(net, body, **SHARDED)


REFUSED = {  # and what the message names
    "split": (lambda z: z.split(2, -1), "split"),
    "cat": (lambda z: torch.cat([z, z], 2), "cat"),
    "cat with others": (lambda z: torch.cat([z, z.full_tensor()]), "cat"),
    "stack": (lambda z: torch.stack([z, z], -1), "stack"),
    "unsqueeze": (lambda z: z.unsqueeze(-1), "unsqueeze"),
    "expand": (lambda z: z.expand(BATCH, LENGTH, 1), "expand"),
    "permute": (lambda z: z.permute(2, 0, 1), "permute"),
    "all": (lambda z: z.isfinite().all(-1), "all"),
    "a running sum": (lambda z: z.cumsum(-1), "cumsum"),
    "argmax": (lambda z: z.argmax(-1), "argmax"),
    "T": (lambda z: z[0].T, "T does not"),
    "softmax of classes in dim 1": (lambda z: z.transpose(1, 2).softmax(1), "softmax"),
    "a linear": (lambda z: F.linear(z, torch.ones(2, VOCAB).double()), "linear"),
    "a mask over the vocabulary": (lambda z: z + torch.ones(VOCAB), f"[{VOCAB}]"),
    "a view across tokens": (lambda z: z.view(2, LENGTH * VOCAB), f"[2, {LENGTH * VOCAB}]"),
    "a view of a number of rows": (lambda z: z.view(3, -1), "[3, -1]"),
    "a flatten": (lambda z: z.flatten(), "flatten"),
    "one column": (lambda z: z[..., 3], "along the vocabulary"),
    "some columns": (lambda z: z[:, :, :4], "along the vocabulary"),
    "an old argument": (lambda z: F.cross_entropy(z[0], TARGETS[0], size_average=False), "size_average"),
}


def test_what_would_take_the_vocabulary_apart_is_refused():
    net, x = inputs()

    def body(ours):
        z = ours(x)
        for name, (use, named) in REFUSED.items():
            with pytest.raises(ModelError, match="sharded-logits") as error:
                use(z)
            assert named in str(error.value), (name, str(error.value))

    on_two(net, body, **SHARDED)
