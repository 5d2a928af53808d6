"""Stock models whose head and loss are one: they equal the unsharded, and what needs logits still has them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import (
    DeferredLogits,
    ModelError,
    PlanError,
    ShardedLogits,
    build_mesh,
    cross_entropy,
    full_gradients,
    parallelize_model,
    parallelize_module,
    recompute,
)
from parallelize.comm.groups import Group
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run, worst
from tests.support.threads import run_ranks


@pytest.mark.variants(every=2)
@pytest.mark.parametrize(("family", "tp"), [("gemma2", 1), ("gemma2", 2), ("gemma2", 4), ("bert", 2)])
def test_planned_models_equal_the_unsharded(family, tp):
    """Logits, loss, gradients of inputs and weights, accumulation, SGD; sharded and whole logits, once they are made.
    Heads of other kinds: the matrix."""
    model = tiny_model(family, torch.float64)
    data = [tiny_batch(seed=1), tiny_batch(seed=2)]
    expected = reference_run(model, data)
    models = [copy.deepcopy(model) for _ in range(tp)]
    sharded = tp == 2

    def body(rank):
        return planned_run(models[rank], tp, data, fuse_loss=True, loss_parallel=sharded, sequence_parallel=tp == 4)

    for actual in run_ranks(tp, body):
        compare(actual, expected, torch.float64)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert"])
def test_models_that_compute_their_own_loss(family):
    model = tiny_model(family)
    ids, labels = tiny_batch()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        net = models[rank]
        net.zero_grad()
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        with torch.no_grad():
            quiet = net(input_ids=ids, labels=labels)
        out = net(input_ids=ids, labels=labels)
        assert isinstance(out.logits, DeferredLogits) and out.logits.deferred is not None
        assert abs(quiet.loss - out.loss) < 1e-6 and quiet.logits.deferred is not None  # nothing was made
        counted = net(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        out.loss.backward()
        return out.loss.detach(), full_gradients(net), counted.detach()

    counted = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss.detach()
    for actual, grads, ours in run_ranks(2, body):
        assert abs(actual - loss.detach()) < 5e-6 * loss.detach() and abs(ours - counted) < 5e-6 * counted
        assert worst(grads, expected)[0] < 5e-6


def test_logits_are_there_when_somebody_looks_at_them():
    model = tiny_model("llama")
    ids, labels = tiny_batch()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        generated = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        net = models[rank]
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True, loss_parallel=False)
        with torch.no_grad():
            logits = net(input_ids=ids).logits
            assert logits.shape == expected.shape and logits.dtype == expected.dtype and "deferred)" in repr(logits)
            last = logits[:, -1].float() / 2
            assert (
                last.deferred is not None
                and worst({"": last.softmax(-1)}, {"": (expected[:, -1] / 2).softmax(-1)})[0] < 5e-6
            )
            assert torch.equal(logits.argmax(-1), expected.argmax(-1)) and logits.deferred is None
            assert torch.allclose(logits[0, 0, :3], expected[0, 0, :3], atol=1e-5)
            logits[..., 3] = -torch.inf  # in what was made
            assert logits.softmax(-1)[..., 3].sum() == 0 and not (logits / 1).argmax(-1).eq(3).any()
            again = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=4).flatten())
            masked = expected.clone()
            masked[..., 3] = -torch.inf
            assert abs(again - F.cross_entropy(masked.flatten(0, 1), labels.clamp(min=4).flatten())) < 1e-5
            assert torch.equal(net.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0), generated)
        logits = net(input_ids=ids).logits
        assert worst({"": logits.detach().argmax(-1).float()}, {"": expected.argmax(-1).float()})[0] == 0
        made = logits.made()
        assert not isinstance(made, ShardedLogits) and made.requires_grad
        assert torch.allclose(logits.full_tensor(), expected, atol=1e-5) and logits.to_local().shape[-1] in (34, 33)

    run_ranks(2, body)


def test_what_needs_logits_is_refused_where_a_gradient_is_wanted():
    def body(rank):
        net = tiny_model("llama")
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        logits = net(input_ids=tiny_batch()[0]).logits
        for allowed in (
            lambda z: z[:, :-1],
            lambda z: z.float() / 2 * 3.0,
            lambda z: torch.tanh(z).view(-1, 67),
            lambda z: z.flatten(0, 1).contiguous(),
            lambda z: z * torch.tensor(0.5),
        ):
            assert isinstance(allowed(logits), DeferredLogits) and allowed(logits).requires_grad
        for refused in (
            lambda z: z.softmax(-1),
            lambda z: z.argmax(-1),
            lambda z: z.view(-1, 48),
            lambda z: z[..., 0],
            lambda z: z + torch.randn(67),
            lambda z: z * torch.ones((), requires_grad=True),
            lambda z: z.mul_(2),
            lambda z: torch.cat([z, z]),
            lambda z: z.register_hook(print),
            lambda z: nn.Linear(67, 2)(z),
            lambda z: F.cross_entropy(torch.randn(5, 67), z),
        ):
            with pytest.raises(ModelError) as error:
                refused(logits)
            assert error.value.slugs == ("deferred-logits",)

    run_ranks(2, body)


def test_recomputed_with_its_loss_inside():
    """A unit that holds head and loss: the forward runs twice, and sends what is saved once."""
    from unittest.mock import patch

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)

        def forward(self, x, targets):
            return F.cross_entropy(50 * torch.tanh(self.head(self.norm(x)) / 50), targets)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tail = nn.Linear(5, 6), Tail()

        def forward(self, x, targets):
            return self.tail(self.first(x), targets)

    net = Net().double()
    x, targets = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 11, (9,))
    net(x, targets).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    plan = {"first": "replicate", "tail.norm": "replicate", "tail.head": "colwise(output=vocabulary)"}
    from parallelize.plan.choose import plan_of

    sent, runs = [], []
    real = Group.all_gather
    net.tail.norm.register_forward_hook(lambda *args: runs.append(1))

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    for save in (None, ["collectives"]):
        models = [copy.deepcopy(net) for _ in range(2)]
        sent.clear(), runs.clear()

        def body(rank, models=models, save=save):
            ours = models[rank]
            ours.zero_grad()
            parallelize_module(ours, build_mesh("cpu", tp=2), plan_of(ours, plan), fuse_loss=True)
            recompute(ours, "full" if save is None else "selective", units=["tail"], save=save)
            ours(x, targets).backward()
            return full_gradients(ours)

        with patch.object(Group, "all_gather", counted):
            for result in run_ranks(2, body):
                assert worst(result, expected)[0] < 1e-12
        gathered = 4 if save is None else 2  # of two ranks
        assert (sent.count((4, 9)), len(runs)) == (gathered, 4), save


def test_heads_that_cannot_be_fused_are_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        net = nn.Sequential(nn.Linear(4, 4), Scaled(4, 6))
        before = dict(net[1].__dict__)
        with pytest.raises(ModelError) as error:
            from parallelize.plan.choose import plan_of

            plan = plan_of(net, {"0": "replicate", "1": "colwise(output=vocabulary)"})
            parallelize_module(net, mesh, plan, fuse_loss=True)
        assert error.value.slugs == ("cannot-fuse-loss",) and net[1].__dict__ == before
        with pytest.raises(PlanError) as error:
            plan = plan_of(net, {"0": "colwise", "1": "rowwise"})
            parallelize_module(net, mesh, plan, fuse_loss=True)
        assert "no-vocabulary-output" in error.value.slugs

    run_ranks(2, body)

    def alone(rank):
        with pytest.raises(PlanError) as error:
            parallelize_model(nn.Linear(3, 4), build_mesh("cpu", dp=1), fuse_loss=True)
        assert error.value.slugs == ("no-vocabulary-output",)

    run_ranks(1, alone)


def test_weights_that_change_before_the_loss_are_named():
    def body(rank):
        net = tiny_model("llama")
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        ids, labels = tiny_batch()
        with torch.no_grad():
            logits = net(input_ids=ids).logits
            for parameter in net.parameters():
                parameter.mul_(0.5)
            for use in (lambda: logits.argmax(-1), lambda: cross_entropy(logits, labels), logits.to_local):
                with pytest.raises(ModelError) as error:
                    use()
                assert error.value.slugs == ("weight-changed",)

    run_ranks(2, body)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "mesh"), [("llama", "dp=2,tp=2"), ("gpt2", "pp=2"), ("gemma2", "dp=2")])
def test_verify_with_it(family, mesh):
    from parallelize import verify

    result = verify(family, None, mesh, fuse_loss=True)
    assert result.ok, str(result)


@pytest.mark.sweep
def test_explain_with_it():
    """Logits are not among what is stored at once, and the all-gather of each chunk is predicted."""
    from parallelize import explain

    options = dict(batch=8, sequence=256)
    plain, fused = (
        explain(lambda: tiny_model("llama", vocab_size=8192), "llama", "tp=2", fuse_loss=on, **options).ranks[0]
        for on in (False, True)
    )
    assert fused.memory.activations < plain.memory.activations - 2048 * 8192 * 4 // 2
    sent = [(line.op, line.bytes, line.count) for line in fused.messages if line.module == "loss" and line.axis == "tp"]
    assert [line for line in sent if line[0] == "all_gather"] == [("all_gather", 128 * 4 * 4 * 2, 16)]
