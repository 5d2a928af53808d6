"""Losses of loops by hand: the module is called, a loss of the package is taken of sharded or deferred logits."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from parallelize import (
    accumulate_gradients,
    cross_entropy,
    linear_cross_entropy,
    loss_parallel,
    token_entropy,
    token_log_probs_and_entropy,
    valid_tokens,
)
from parallelize.tools.verification.precision import InFloat64
from tests.matrix.feature import at, change, feature
from tests.matrix.features.forwards import DeliberateError, layers_of, raise_deliberately
from tests.matrix.kinds import IGNORED, logits_of, summed_loss
from tests.matrix.sides import Side

NOT_BY_HAND = {"stage-called-alone": "a stage of a pipeline runs in `step`"}


def by_hand(side: Side, number: int = 0, **options: float) -> None:
    """Forward, cross entropy of the package, backward."""
    logits, targets = logits_of(side.forward(number)), side.split(side.targets(number))
    if side.alone:
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", **options)
        loss = loss / side.count(number)
    else:
        loss = cross_entropy(logits, targets, num_tokens=side.count(number), **options)
    loss.backward()
    side.record("loss", side.summed(loss))


change("loop_by_hand", step=by_hand, refused=NOT_BY_HAND)


@feature(refused=NOT_BY_HAND, needs={"causal"})
def error_in_a_loop_by_hand(side: Side) -> None:
    """In a backward; the next one is as if it had not been."""
    side.place()
    handle = layers_of(side)[0].register_full_backward_pre_hook(raise_deliberately)
    with suppress(DeliberateError):
        by_hand(side, 0)
    handle.remove()
    for parameter in side.model.parameters():
        parameter.grad = None
    by_hand(side, 1)


@feature(
    needs={"causal"},
    refused={**NOT_BY_HAND, "gradient-inputs": "planned modules compute with local tensors, which it does not reach"},
)
def derivative_between(side: Side) -> None:
    """`torch.autograd.grad` changes no `.grad`."""
    side.place()
    by_hand(side, 0)
    total = side.summed_loss(side.forward(1), side.targets(1))
    torch.autograd.grad(total, [p for p in side.model.parameters() if p.requires_grad], allow_unused=True)


@at("step", refused=NOT_BY_HAND, needs={"text"})
def label_smoothing(side: Side, number: int) -> None:
    by_hand(side, number, label_smoothing=0.1)


@at("step", refused=NOT_BY_HAND, needs={"text"})
def z_loss(side: Side, number: int) -> None:
    logits, targets = logits_of(side.forward(number)), side.split(side.targets(number))
    if side.alone:
        square = logits.logsumexp(-1).square() * (targets != IGNORED)
        loss = (summed_loss(logits, targets) + 0.01 * square.sum()) / side.count(number)
    else:
        loss = cross_entropy(logits, targets, num_tokens=side.count(number), z_loss=0.01)
    loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused=NOT_BY_HAND, needs={"stock"}, without={"encoder-decoder"})
def loss_of_the_stock_model(side: Side) -> None:
    """From labels: a rank's part of the mean over all ranks, whose gradients are its parts of the sum."""
    side.place()
    labels = side.kind.labels(0)
    calls: list[dict[str, Any]] = [{}]
    if "causal" in side.kind.traits:
        calls.append({"num_items_in_batch": (labels[:, 1:] != IGNORED).sum()})
    for extra in calls:
        with InFloat64():
            loss = side.forward(0, labels=side.local(labels), **extra).loss
            loss.backward()
        side.record("loss", side.summed(loss))


@feature(refused=NOT_BY_HAND)
def accumulated_by_hand(side: Side) -> None:
    side.place()
    if side.alone:
        by_hand(side, 0)
        by_hand(side, 1)
    else:
        with accumulate_gradients(side.model):
            by_hand(side, 0)
            by_hand(side, 1)


FAILED_IN_A_BLOCK = {
    "refused_with": {"error": {"failed-backward": "a part of a backward that fails in a block of ZeRO 2 is summed"}}
}


@at("around", **FAILED_IN_A_BLOCK)
def steps_in_one_block(side: Side, number: int, step: Any) -> None:
    """Two backwards, whose sums over ranks may be made at once."""
    with nullcontext() if side.alone else accumulate_gradients(side.model):
        step(number)
        step(number + 1)


@at("around", **FAILED_IN_A_BLOCK)
def gradients_dropped_in_a_block(side: Side, number: int, step: Any) -> None:
    """Those of a first backward, of which nothing may be left in what is summed when the block ends."""
    with nullcontext() if side.alone else accumulate_gradients(side.model):
        step(number)
        for parameter in side.model.parameters():
            parameter.grad = None
        step(number + 1)


def _policy_gradient(side: Side, number: int, temperature: float = 1.0) -> None:
    logits, ids = logits_of(side.forward(number)), side.split(side.targets(number))
    valid = ids != IGNORED
    if side.alone:
        log_probs = (logits / temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    else:
        chosen, entropy = token_log_probs_and_entropy(logits, ids, temperature=temperature)
    advantages = torch.where(valid, (ids % 5).double() - 2, 0)
    loss = -((advantages * chosen + 0.1 * entropy * valid).sum()) / side.count(number)
    loss.backward()
    side.record("loss", side.summed(loss))


change("policy_gradient", step=_policy_gradient, refused=NOT_BY_HAND, needs={"text"})
change(
    "policy_gradient_of_deferred_logits",
    options={"fuse_loss": True},
    step=partial(_policy_gradient, temperature=0.7),
    meets=False,
    refused=NOT_BY_HAND,
    needs={"text"},
)


@feature(refused=NOT_BY_HAND, needs={"text"}, others=(None,))
def distillation(side: Side) -> None:
    """The cross entropy against the probabilities of a teacher that is on the same mesh."""
    side.place()
    teacher = side.others[0].requires_grad_(False).eval()
    if not side.alone:
        teacher = side.apply(teacher).module
    student = side.model
    with torch.no_grad():
        side.model = teacher
        wanted = _full(logits_of(side.forward())).softmax(-1)
    side.model = student
    loss = -(wanted * _full(logits_of(side.forward())).log_softmax(-1)).sum() / side.count()
    loss.backward()
    side.record("loss", side.summed(loss))


def _full(logits: torch.Tensor) -> torch.Tensor:
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


change("fused_loss", options={"fuse_loss": True}, apart={"loss"}, needs={"text"})  # logits are never stored


@feature(needs={"text"})
def fused_loss_and_evaluation(side: Side) -> None:
    """A head stays gathered for a loss that has no backward; after a step it has the new weights all the same."""
    side.place(fuse_loss=True)
    side.optimizer()
    for number in range(2):
        side.step(number)
        if number == 0:
            side.evaluate(2)
        elif side.alone or "pp" not in side.axis.sizes:
            side.forward(2)
        else:
            with torch.no_grad():
                side.parallel.forward(**side.inputs(2))
        side.update()
        side.evaluate(2)


@feature(needs={"text"})
def optimizer_after_an_evaluation(side: Side) -> None:
    """It gets the parameters, not what the evaluation has left gathered in their place."""
    side.place(fuse_loss=True)
    side.evaluate(2)
    side.train()
    side.update()


@feature(refused=NOT_BY_HAND, needs={"text"})
def fused_entropy(side: Side) -> None:
    side.place(fuse_loss=True)
    logits, valid = logits_of(side.forward()), side.split(side.targets()) != IGNORED
    if side.alone:
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    else:
        entropy = token_entropy(logits)
    loss = (entropy * valid).sum() / side.count()
    loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused=NOT_BY_HAND, needs={"text"})
def torch_loss_parallel(side: Side) -> None:
    """PyTorch's own loss, of sharded logits in PyTorch's context."""
    side.place()
    logits, targets = logits_of(side.forward()), side.split(side.targets())
    if side.alone:
        loss = summed_loss(logits, targets) / side.count()
        loss.backward()
    else:
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / side.count()
            loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused=NOT_BY_HAND, needs={"text"})
def counted_tokens(side: Side) -> None:
    """The global count of targets, by the package."""
    side.place()
    targets = side.split(side.targets())
    count = side.count() if side.alone else valid_tokens(targets, side.mesh)
    side.record("count", float(count))
    logits = logits_of(side.forward())
    loss = summed_loss(logits, targets) / count if side.alone else cross_entropy(logits, targets, mesh=side.mesh)
    loss.backward()
    side.record("loss", side.summed(loss))


@feature(refused={**NOT_BY_HAND, "bad-head": "ZeRO 3 gathers a weight in its module alone"}, needs={"text", "causal"})
def loss_of_hidden_states(side: Side) -> None:
    """`linear_cross_entropy` of the model's own head, whose weight the package finds sharded."""
    side.place()
    hidden = {}
    head = side.model.get_output_embeddings() if hasattr(side.model, "get_output_embeddings") else side.model.head
    handle = head.register_forward_pre_hook(lambda _, inputs: hidden.update(x=inputs[0]))
    side.forward()
    handle.remove()
    targets = side.split(side.targets())
    if side.alone:
        loss = summed_loss(head(hidden["x"]), targets) / side.count()
    else:
        loss = linear_cross_entropy(hidden["x"], head.weight, targets, bias=head.bias, num_tokens=side.count())
    loss.backward()
    side.record("loss", side.summed(loss))
