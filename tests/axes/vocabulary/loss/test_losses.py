"""Cross entropy on sharded logits: every option, any vocabulary, stock loss functions, nothing read wrongly."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import (
    ShapeError,
    ShardedLogits,
    build_mesh,
    cross_entropy,
    full_gradients,
    parallelize_module,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


def sharded(full: torch.Tensor, tp: int):
    group = Group(build_mesh("cpu", tp=tp).get_group())
    start, stop = even_interval(full.shape[-1], tp, group.rank)
    leaf = full[..., start:stop].clone().requires_grad_()
    return leaf, mark(leaf * 1, Vocabulary(full.shape[-1], group))


def test_whole_logits_and_bad_targets():
    logits, targets = torch.randn(4, 7), torch.tensor([0, 6, -100, 2])
    assert torch.allclose(cross_entropy(logits, targets), F.cross_entropy(logits, targets))
    with pytest.raises(ShapeError):
        cross_entropy(logits, targets[:3])
    with pytest.raises(ShapeError):
        cross_entropy(logits, targets, reduction="median")


def test_forward_sends_three_values_a_token_and_backward_nothing():
    from unittest.mock import patch

    sent = []
    real = Group.all_reduce

    def counted(self, x, *args):
        sent.append(x.numel())
        return real(self, x, *args)

    def body(rank):
        _, marked = sharded(torch.randn(6, 8, dtype=torch.float64), 2)
        loss = cross_entropy(marked, torch.zeros(6, dtype=torch.long), label_smoothing=0.1, z_loss=0.1)
        before = list(sent)
        loss.backward()
        return before

    with patch.object(Group, "all_reduce", counted):
        run_ranks(2, body)
    assert sorted(sent) == [6] * 6  # two ranks


FROM_LABELS = [
    ("llama", None),
    ("gpt2", None),
    ("gemma2", None),
    ("bert", None),
    ("opt", None),
    ("bert", "BertForPreTraining"),
    ("bert", "BertLMHeadModel"),
    ("gpt2", "GPT2DoubleHeadsModel"),
]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("family", "cls"), FROM_LABELS, ids=[f"{f}-{c}" for f, c in FROM_LABELS])
def test_models_that_compute_their_own_loss(family, cls):
    """From `labels`, by a `loss_function` or by `CrossEntropyLoss` inline."""
    import transformers

    model = tiny_model(family)
    if cls is not None:
        torch.manual_seed(0)
        config = copy.deepcopy(model.config)
        config.is_decoder, config.summary_first_dropout = cls == "BertLMHeadModel", 0.0
        model = getattr(transformers, cls)(config)
    ids, labels = tiny_batch()
    extra = {"next_sentence_label": torch.tensor([0, 1])} if cls == "BertForPreTraining" else {}
    if cls == "GPT2DoubleHeadsModel":
        ids, labels, extra = ids[None], labels[None], {"mc_token_ids": torch.tensor([[8, 8]])}
    loss = model(input_ids=ids, labels=labels, **extra).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]
    for net in models:
        net.zero_grad()

    def body(rank):
        net = models[rank]
        parallelize_module(net, build_mesh("cpu", tp=2), loss_parallel=True)
        actual = net(input_ids=ids, labels=labels, **extra).loss
        actual.backward()
        return actual.detach(), full_gradients(net)

    for actual, grads in run_ranks(2, body):
        assert abs(actual - loss.detach()) < 5e-6 * loss.detach()
        assert worst(grads, expected)[0] < 5e-6


def test_what_takes_tokens_or_changes_entries_alone_is_sharded_too():
    def body(rank):
        _, marked = sharded(torch.randn(2, 5, 8), 2)
        assert isinstance(marked, ShardedLogits) and marked.shape == (2, 5, 8) and marked.numel() == 80
        assert marked.size(-1) == 8 and "vocabulary" in repr(marked)
        for allowed in (
            lambda z: z[:, :-1],
            lambda z: z[..., :-1, :],
            lambda z: z[0],
            lambda z: z.float() / 2,
            lambda z: z.view(-1, 8),
            lambda z: z.reshape(10, -1),
            lambda z: torch.tanh(z) * 3,
        ):
            assert isinstance(allowed(marked), ShardedLogits)
        assert marked.to_local().shape == (2, 5, 4) and marked.full_tensor().shape == (2, 5, 8)

    run_ranks(2, body)
