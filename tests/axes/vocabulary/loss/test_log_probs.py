"""Log-probabilities and entropies of chosen tokens: every form of logits, gradients, one pass, no full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from parallelize import (
    ModelError,
    ShapeError,
    build_mesh,
    linear_token_log_probs,
    token_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.memory import peak_bytes
from tests.support.parity import worst
from tests.support.threads import run_ranks

LEAD, HIDDEN = (3, 5), 7
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}


def example_inputs(vocab, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(*LEAD, HIDDEN, dtype=dtype), torch.randn(vocab, HIDDEN, dtype=dtype)
    bias = torch.randn(vocab, dtype=dtype) + 20
    ids = torch.randint(0, vocab, LEAD)
    ids[2, 3:] = -100
    return hidden, weight, bias, ids


def reference(logits, ids, temperature):
    """By torch: log_softmax, gather; both 0 where ignored."""
    log_p = (logits / temperature).log_softmax(-1)
    valid = ids != -100
    chosen = log_p.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(~valid, 0.0), (-(log_p.exp() * log_p).sum(-1)).masked_fill(~valid, 0.0)


def policy_loss(log_probs, entropies):
    """Uneven weights, and both parts."""
    weights = torch.arange(1.0, log_probs.numel() + 1, dtype=log_probs.dtype).view(log_probs.shape)
    loss = (weights * log_probs).sum()
    return loss if entropies is None else loss - 0.3 * entropies.square().sum()


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("form", ["marked", "dtensor", "linear"])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(
    ("tp", "vocab", "dtype", "temperature"),
    [
        (1, 11, torch.float64, 0.7),
        (2, 11, torch.float64, 1.0),
        (2, 11, torch.float32, 0.7),
        (4, 10, torch.float64, 2.0),
        (4, 10, torch.float32, 1.0),
        (4, 3, torch.float64, 0.7),
    ],
)
def test_equals_torch(tp, vocab, dtype, temperature, entropy, form):
    hidden, weight, bias, ids = example_inputs(vocab, dtype)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*leaves)
    logits.retain_grad()
    log_probs, entropies = reference(logits, ids, temperature)
    policy_loss(log_probs, entropies if entropy else None).backward()
    expected = {"log_probs": log_probs.detach(), "logits": logits.grad}
    expected |= {"entropies": entropies.detach()} if entropy else {}

    def of_logits(rank):
        mesh = build_mesh("cpu", tp=tp)
        start, stop = even_interval(vocab, tp, rank)
        leaf = logits.detach()[..., start:stop].clone().requires_grad_()
        if form == "marked":
            sharded = mark(leaf * 1, Vocabulary(vocab, Group(mesh.get_group())))
        else:
            shape = logits.shape
            sharded = DTensor.from_local(leaf, mesh, [Shard(-1)], run_check=False, shape=shape, stride=logits.stride())
        ours = token_log_probs_and_entropy(sharded, ids, temperature=temperature) if entropy else None
        ours = ours or (token_log_probs(sharded, ids, temperature=temperature), None)
        policy_loss(*ours).backward()
        return {"log_probs": ours[0].detach(), "logits": leaf.grad} | (
            {"entropies": ours[1].detach()} if entropy else {}
        )

    def of_linear(rank):
        mesh = build_mesh("cpu", tp=tp)
        start, stop = even_interval(vocab, tp, rank)
        parts = {
            name: DTensor.from_local(
                x[start:stop].clone(), mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()
            ).requires_grad_()
            for name, x in (("weight", weight), ("bias", bias))
        }
        leaf = hidden.clone().requires_grad_()
        ours = linear_token_log_probs(
            leaf, parts["weight"], ids, bias=parts["bias"], entropy=entropy, temperature=temperature, chunk=4
        )
        policy_loss(*ours).backward()
        result = {"log_probs": ours[0].detach(), "hidden": leaf.grad}
        result |= {name: x.grad.full_tensor() for name, x in parts.items()}
        return result | ({"entropies": ours[1].detach()} if entropy else {})

    if form == "linear":
        expected |= {"hidden": leaves[0].grad, "weight": leaves[1].grad, "bias": leaves[2].grad}
        del expected["logits"]
        for result in run_ranks(tp, of_linear):
            assert worst(result, expected)[0] <= BOUND[dtype]
        return
    result = run_ranks(tp, of_logits)
    result[0]["logits"] = torch.cat([values["logits"] for values in result], -1)
    assert worst(result[0], expected)[0] <= BOUND[dtype]


def test_whole_logits_and_masked_ones():
    logits = torch.randn(4, 6, dtype=torch.float64)
    logits[:, 2] = -torch.inf  # as a sampler's mask leaves them
    leaf = logits.clone().requires_grad_()
    entropies = token_entropy(leaf, temperature=0.5)
    entropies.sum().backward()
    unmasked = torch.cat([logits[:, :2], logits[:, 3:]], -1).requires_grad_()
    expected = torch.distributions.Categorical(logits=unmasked / 0.5).entropy()
    expected.sum().backward()
    assert torch.allclose(entropies, expected, rtol=1e-12, atol=1e-13)
    assert (leaf.grad[:, 2] == 0).all() and torch.allclose(
        leaf.grad[:, 3:], unmasked.grad[:, 2:], rtol=1e-11, atol=1e-13
    )

    def body(rank):
        group = Group(build_mesh("cpu", tp=3).get_group())
        full = logits.clone()
        full[:, 3], full[:, 0] = -torch.inf, 700.0  # all of the second rank's part
        part = mark(full[:, 2 * rank : 2 * rank + 2].clone(), Vocabulary(6, group))
        ids = torch.tensor([0, 1, 4, 5])
        return token_log_probs(part, ids) - full.log_softmax(-1)[torch.arange(4), ids], token_entropy(part)

    for difference, entropy in run_ranks(3, body):
        assert difference.abs().max() < 1e-10 and torch.isfinite(entropy).all()


def test_one_collective_a_pass_and_bad_input():
    from unittest.mock import patch

    sent = []
    real = Group.all_gather

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    def body(rank):
        group = Group(build_mesh("cpu", tp=2).get_group())
        leaf = torch.randn(6, 4, requires_grad=True)
        ids = torch.zeros(6, dtype=torch.long)
        log_probs, entropies = token_log_probs_and_entropy(mark(leaf * 1, Vocabulary(8, group)), ids)
        (log_probs + entropies).sum().backward()

    with patch.object(Group, "all_gather", counted):
        run_ranks(2, body)
    assert sent == [(5, 6)] * 2
    logits, ids = torch.randn(3, 5), torch.tensor([0, 4, 1])
    for call, slug in (
        (lambda: token_log_probs(logits, ids, temperature=0), "bad-temperature"),
        (lambda: token_log_probs(logits, ids, temperature=float("nan")), "bad-temperature"),
        (lambda: token_log_probs(logits, ids[:2]), "bad-targets"),
        (lambda: token_log_probs(logits, torch.rand(3, 5)), "bad-targets"),
        (lambda: linear_token_log_probs(logits, torch.randn(4, 5), torch.rand(3, 4)), "bad-targets"),
        (lambda: token_log_probs(logits, ids + 3), "id-out-of-range"),
    ):
        with pytest.raises(ShapeError) as error:
            call()
        assert error.value.slugs == (slug,)
    with pytest.raises(ModelError) as refused:
        token_log_probs(logits.requires_grad_(), ids).sum().backward(create_graph=True)
    assert refused.value.slugs == ("double-backward",)


def test_memory_of_one_chunk():
    hidden, weight = (torch.empty(rows, 256, device="meta").requires_grad_() for rows in (2048, 32768))
    ids = torch.zeros(2048, dtype=torch.long, device="meta")

    def unfused():
        log_probs, entropies = token_log_probs_and_entropy(F.linear(hidden, weight), ids)
        (log_probs + entropies).sum().backward()

    def fused():
        log_probs, entropies = linear_token_log_probs(hidden, weight, ids, entropy=True)
        (log_probs + entropies).sum().backward()

    full = peak_bytes(unfused)
    hidden.grad = weight.grad = None
    assert peak_bytes(fused) <= full / 5
