"""Deferred logits give the gradients of computed logits, and refuse by name what they cannot serve."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from parallelize import (
    DeferredLogits,
    ModelError,
    ShardedLogits,
    build_mesh,
    cross_entropy,
    full_gradients,
    parallelize_model,
    token_log_probs,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.state.records import applied
from tests.axes.vocabulary.small_head import HIDDEN, TOKENS, VOCAB, alone, on_two, slug_of, small
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


@pytest.mark.parametrize("sharded", [False, True])
def test_a_metric_before_the_loss_leaves_the_loss_its_gradients(sharded):
    net, x, targets = small()
    losses = {
        "stock": lambda z: F.cross_entropy(z, targets),
        "ours": lambda z: cross_entropy(z, targets),
        "log_probs": lambda z: -token_log_probs(z, targets).mean(),
        "shifted": lambda z: F.cross_entropy(z[:].view(-1, VOCAB), targets),
        "made": lambda z: F.cross_entropy(z.made(), targets),
    }
    F.cross_entropy(net(x), targets).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    highest = net(x).argmax(-1)

    def metric(z):
        full = z.full_tensor() if sharded else z
        return full.argmax(-1)

    def body(ours):
        results = []
        for loss_of in losses.values():
            ours.zero_grad()
            z = ours(x)
            with torch.no_grad():
                assert torch.equal(metric(z), highest) and torch.equal(metric(z.float()), highest)
            loss_of(z).backward()
            results.append(full_gradients(ours))
        with torch.no_grad():
            stored = ours(x)
            assert stored.to_local().grad_fn is None and not stored.requires_grad
        return results

    for results in on_two(net, body, loss_parallel=sharded):
        for name, gradients in zip(losses, results, strict=True):
            assert worst(gradients, expected)[0] < 1e-12, name


def test_writes_into_deferred_logits_are_refused():
    net, x, _ = small()

    def body(ours):
        z = ours(x)
        with torch.no_grad():
            for write in (lambda: z.__setitem__((..., 3), 0.0), lambda: z.masked_fill_(z > 0, 0.0)):
                assert slug_of(ModelError, write) == "deferred-logits"

    on_two(net, body)


def test_what_is_taken_under_no_grad_has_no_graph():
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    z = alone(hidden, weight)
    with torch.no_grad():
        quiet = z[1:].float()
    assert not quiet.requires_grad and quiet.softmax(-1).shape == (TOKENS - 1, VOCAB) and z.requires_grad


@pytest.mark.parametrize("of", ["model", "head"])
def test_reentrant_checkpoints_are_refused_by_name(of):
    net, x, targets = small()
    F.cross_entropy(net(x), targets).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}

    def body(ours):
        part = ours if of == "model" else lambda x: ours.head(ours.first(x)).float() / 2
        z = checkpoint(part, x.clone().requires_grad_(), use_reentrant=True)
        for use in (
            lambda: F.cross_entropy(z, targets),
            lambda: cross_entropy(z, targets),
            lambda: token_log_probs(z, targets),
            lambda: z.view(-1, VOCAB),
            z.to_local,
            z.made,
        ):
            assert slug_of(ModelError, use) == "reentrant-checkpoint"
        ours.zero_grad()
        inside = lambda x: F.cross_entropy(ours(x), targets)  # noqa: E731
        checkpoint(inside, x.clone().requires_grad_(), use_reentrant=True).backward()
        return full_gradients(ours)

    net.zero_grad()
    for results in on_two(net, body):
        assert worst(results, expected)[0] < 1e-12


STEPS = {
    "mul by keywords": lambda z: torch.mul(input=z, other=2.0),
    "mul from the left": lambda z: torch.mul(2.0, z),
    "clamp by keywords": lambda z: torch.clamp(input=z, min=-1),
    "clamp_min": lambda z: z.clamp_min(-0.5),
    "add": lambda z: torch.add(z, 1.5, alpha=2) * 0.5,
    "sub": lambda z: torch.sub(z, 0.5) * 2,
    "from one": lambda z: 1 - z,
    "itself": lambda z: z * z,
    "type_as": lambda z: z.type_as(torch.zeros(3, dtype=torch.float32)) / 2,
    "to": lambda z: z.to(torch.zeros(3, dtype=torch.float32)) / 2,
    "flatten by keywords": lambda z: torch.flatten(input=z, start_dim=0, end_dim=0),
    "reshape by keywords": lambda z: torch.reshape(input=z, shape=(-1, VOCAB)),
}


@pytest.mark.parametrize("name", STEPS)
def test_elementwise_functions_before_the_loss(name):
    """Deferred, and sharded."""
    step = STEPS[name]
    net, x, targets = small()
    F.cross_entropy(step(net(x)), targets).backward()
    expected = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()

    def body(ours):
        z = step(ours(x))
        assert type(z) is (DeferredLogits if applied(ours.head).defers_logits else ShardedLogits)
        F.cross_entropy(z, targets).backward()
        return full_gradients(ours)

    bound = 1e-12 if name not in ("type_as", "to") else 5e-6
    for options in ({}, {"fuse_loss": False, "loss_parallel": True}):
        for results in on_two(net, body, **options):
            assert worst(results, expected)[0] < bound


def test_metadata_needs_no_logits():
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    z = alone(hidden, weight)
    assert len(z) == TOKENS and z.is_contiguous() and z.deferred is not None
    assert torch.zeros(3, dtype=torch.float64).type_as(z).dtype == torch.float32
    marked = mark(torch.randn(TOKENS, VOCAB), Vocabulary(VOCAB, Group.alone()))
    assert len(marked) == TOKENS and type(torch.zeros(1, dtype=torch.float64).type_as(marked)) is torch.Tensor


@pytest.mark.parametrize("weighted", [False, True])
def test_widened_logits_with_smoothing_and_class_weights(weighted):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    targets, class_weight = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(VOCAB) + 0.1
    class_weight = class_weight.double() if weighted else None

    def run(logits):
        hidden.grad = weight.grad = None
        loss = F.cross_entropy(logits.double(), targets, class_weight, label_smoothing=0.1)
        loss.backward()
        return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}

    expected, actual = run(F.linear(hidden, weight)), run(alone(hidden, weight))
    assert actual["loss"].dtype == torch.float64 and abs(actual["loss"] - expected["loss"]) < 1e-12
    assert worst(actual, expected)[0] < 5e-6


def test_a_second_backward_of_a_fused_loss_under_zero_3_is_refused():
    ids, labels = tiny_batch(batch=2, length=8)
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        mesh = build_mesh("cpu", dp=2)
        parallel = parallelize_model(models[rank], mesh, zero=3, fuse_loss=True)
        loss = cross_entropy(parallel.module(input_ids=ids).logits, labels, mesh=mesh)
        loss.backward(retain_graph=True)
        with pytest.raises(ModelError, match="second backward") as error:
            loss.backward()
        assert error.value.slugs == ("weight-let-go",)

    run_ranks(2, body)


def test_logits_after_backward_under_zero_3_say_when_to_take_them():
    ids, labels = tiny_batch(batch=2, length=8)
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=3, fuse_loss=True)
        out = parallel.module(input_ids=ids, labels=labels)
        out.loss.backward()
        with torch.no_grad():
            for use in (lambda: out.logits.argmax(-1), out.logits.to_local, out.logits.made):
                with pytest.raises(ModelError, match="metrics before backward") as error:
                    use()
                assert error.value.slugs == ("weight-let-go",)

    run_ranks(2, body)
