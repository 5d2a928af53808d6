"""Losses that people write themselves, on the logits that a model returns: of tokens, of sequences, of pairs.

Each is a sum divided by the count of all ranks, as docs/whole-mesh.md asks for; what a stage computes runs in `step`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.matrix.habits import descend, frozen, habit, tokens, whole_model, whole_sequences
from tests.matrix.kinds import VOCAB
from tests.matrix.sides import Side


@habit(on=whole_model)
def loss_of_selected_tokens(side: Side) -> None:
    """Logits and targets are chosen by a mask before the loss."""
    side.place()
    for number in range(2):
        read = tokens(side, number)
        loss = F.cross_entropy(read.logits[read.valid], read.ids[read.valid], reduction="sum") / read.count
        descend(side, loss)


@habit(on=whole_sequences)
def logits_shifted_by_hand(side: Side) -> None:
    side.place()
    for number in range(2):
        ids = side.inputs(number)["input_ids"]
        logits = tokens(side, number).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="sum")
        descend(side, loss / 88)  # eight rows of eleven next tokens


@habit(on=whole_model)
def weighted_tokens(side: Side) -> None:
    """A weight for each token, as for completions and prompts."""
    side.place()
    read = tokens(side)
    weights = 0.5 + (read.ids % 4).double()
    total = side.summed((weights * read.valid).sum())
    descend(side, (weights * read.losses).sum() / total)


@habit(on=whole_model)
def class_weights(side: Side) -> None:
    side.place()
    read = tokens(side)
    weights = 1 + torch.arange(VOCAB, dtype=torch.float64) / VOCAB
    loss = F.cross_entropy(read.logits[read.valid], read.ids[read.valid], weight=weights, reduction="sum")
    descend(side, loss / side.summed((weights[read.ids] * read.valid).sum()))


@habit(on=whole_sequences)
def mean_of_sequences(side: Side) -> None:
    """Each sequence counts alike, however long it is."""
    side.place()
    read = tokens(side)
    means = read.losses.sum(1) / read.valid.sum(1).clamp(min=1)
    descend(side, means.sum() / 8)


@habit(on=whole_model)
def unlikelihood(side: Side) -> None:
    side.place()
    read = tokens(side)
    descend(side, read.mean(-torch.log1p(-read.log_probs.exp() + 1e-6)))


@habit(on=whole_model)
def focal_loss(side: Side) -> None:
    side.place()
    read = tokens(side)
    descend(side, read.mean((1 - read.log_probs.exp()) ** 2 * read.losses))


@habit(on=whole_model)
def confidence_penalty(side: Side) -> None:
    """The entropy of the full distribution is added."""
    side.place()
    read = tokens(side)
    log_probs = read.logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    descend(side, read.mean(read.losses - 0.1 * entropy))


@habit(on=whole_model)
def z_loss_by_hand(side: Side) -> None:
    side.place()
    read = tokens(side)
    descend(side, read.mean(read.losses + 0.01 * read.logits.logsumexp(-1).square()))


@habit(on=whole_model)
def smoothed_labels_by_hand(side: Side) -> None:
    side.place()
    read = tokens(side)
    uniform = -read.logits.log_softmax(-1).mean(-1)
    descend(side, read.mean(0.9 * read.losses + 0.1 * uniform))


@habit(on=whole_model)
def hinge_of_logits(side: Side) -> None:
    """The target's logit should exceed each other one by a margin."""
    side.place()
    read = tokens(side)
    chosen = read.logits.gather(-1, read.ids.unsqueeze(-1))
    hinge = (1 + read.logits - chosen).clamp(min=0).mean(-1)
    descend(side, read.mean(hinge))


@habit(on=whole_sequences)
def hardest_tokens(side: Side) -> None:
    """The loss of the four worst tokens of each sequence."""
    side.place()
    worst = tokens(side).losses.topk(4, dim=1).values
    descend(side, worst.sum() / 32)


@habit(on=whole_model)
def losses_as_weights(side: Side) -> None:
    """A token counts by its own loss over the mean of all."""
    side.place()
    read = tokens(side)
    mean = side.summed(read.mean(read.losses))
    descend(side, read.mean(read.losses * (read.losses.detach() / mean)))


@habit(on=whole_model)
def whitened_advantages(side: Side) -> None:
    """Advantages minus their mean over their deviation, of all ranks; a policy gradient with them."""
    side.place()
    read = tokens(side)
    rewards = (read.ids % 5).double()
    mean = side.summed(read.mean(rewards))
    deviation = side.summed(read.mean((rewards - mean).square())).sqrt()
    descend(side, -read.mean((rewards - mean) / deviation * read.log_probs))


@habit(on=whole_model)
def clipped_ratios(side: Side) -> None:
    """Proximal policy optimization: probabilities of before, then two updates on the same tokens."""
    side.place()
    with torch.no_grad():
        before = tokens(side).log_probs
    for _ in range(2):
        read = tokens(side)
        ratio, advantages = (read.log_probs - before).exp(), (read.ids % 5).double() - 2
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        descend(side, -read.mean(gain))
        side.record("clipped", side.summed(read.mean(((ratio - 1).abs() > 0.1).double())))


@habit(on=whole_model)
def rollouts_then_epochs(side: Side) -> None:
    """The probabilities of all batches first; then updates batch by batch, which drift from them."""
    side.place()
    with torch.no_grad():
        before = [tokens(side, number).log_probs for number in range(2)]
    for number in (0, 1, 0):
        read = tokens(side, number)
        ratio = (read.log_probs - before[number]).clamp(-1, 1).exp()
        descend(side, -read.mean(ratio * ((read.ids % 3).double() - 1)))


@habit(on=whole_model, others=(None,))
def reference_divergence(side: Side) -> None:
    """A policy gradient with an estimate of the divergence from a frozen model."""
    side.place()
    reference = frozen(side)
    for _ in range(2):
        with torch.no_grad():
            theirs = tokens(side, model=reference).log_probs
        read = tokens(side)
        difference = theirs - read.log_probs
        divergence = difference.exp() - difference - 1
        advantages = (read.ids % 5).double() - 2
        descend(side, read.mean(0.1 * divergence - advantages * read.log_probs))


@habit(on=whole_sequences, others=(None,))
def preference_of_two_forwards(side: Side) -> None:
    """Direct preference optimization: the chosen rows in one forward, the rejected ones in another."""
    side.place()
    reference = frozen(side)
    margins = []
    for number in range(2):
        with torch.no_grad():
            theirs = tokens(side, number, reference).log_probs.sum(1)
        margins.append(tokens(side, number).log_probs.sum(1) - theirs)
    descend(side, -F.logsigmoid(0.1 * (margins[0] - margins[1])).sum() / 8)


@habit(on=whole_sequences)
def odds_ratio(side: Side) -> None:
    """Preference without a reference: the likelihood of the chosen rows, and the odds over the rejected ones."""
    side.place()
    chosen, rejected = (tokens(side, number) for number in range(2))
    likely, unlikely = (read.log_probs.sum(1) / read.valid.sum(1).clamp(min=1) - 1e-3 for read in (chosen, rejected))
    odds = likely - unlikely - torch.log1p(-likely.exp()) + torch.log1p(-unlikely.exp())
    descend(side, chosen.mean(chosen.losses) - 0.1 * F.logsigmoid(odds).sum() / 8)


@habit(on=whole_model)
def greedy_actions(side: Side) -> None:
    """The most likely tokens are the actions, whose log-probabilities are weighed by a reward."""
    side.place()
    read = tokens(side)
    actions = read.logits.argmax(-1)
    log_probs = read.logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    descend(side, -read.mean((actions == read.ids).double() * log_probs + 0.1 * log_probs))


@habit(on=whole_model)
def accuracy_and_perplexity(side: Side) -> None:
    """What is logged of an evaluation over several batches."""
    side.place()
    side.train()
    side.update()
    total, hits, count = 0.0, 0.0, 0
    side.model.eval()
    with torch.no_grad():
        for number in range(2, 4):
            read = tokens(side, number)
            total += float(side.summed(read.losses.sum()))
            hits += float(side.summed(((read.logits.argmax(-1) == read.ids) & read.valid).sum().double()))
            count += read.count
    side.model.train()
    side.record("perplexity", torch.tensor(total / count, dtype=torch.float64).exp())
    side.record("accuracy", hits / count)
    side.train()


@habit(on=whole_model)
def retained_graph(side: Side) -> None:
    """Two losses of one forward, each with a backward of its own."""
    side.place()
    read = tokens(side)
    read.mean(read.losses).backward(retain_graph=True)
    descend(side, read.mean(0.01 * read.logits.logsumexp(-1).square()))


@habit(on=whole_model)
def two_losses_at_once(side: Side) -> None:
    side.place()
    read = tokens(side)
    losses = [read.mean(read.losses), read.mean(0.01 * read.logits.square().mean(-1))]
    torch.autograd.backward(losses)
    for loss in losses:
        side.record("loss", side.summed(loss))


@habit(on=whole_model)
def two_batches_in_one_backward(side: Side) -> None:
    """The losses of two tasks, weighed and added before the backward."""
    side.place()
    first, second = (tokens(side, number) for number in range(2))
    descend(side, 0.7 * first.mean(first.losses) + 0.3 * second.mean(second.losses))


@habit(on=whole_model)
def weights_of_losses_that_learn(side: Side) -> None:
    """Two losses, weighed by scalars that are stepped by hand, of which the model knows nothing."""
    side.place()
    scale = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for number in range(2):
        read = tokens(side, number)
        both = torch.stack([read.mean(read.losses), read.mean(0.1 * read.logits.square().mean(-1))])
        share = read.valid.sum() / read.count  # of this rank, in what every rank adds
        loss = (both * (-scale).exp()).sum() + share * scale.sum()
        descend(side, loss)
        with torch.no_grad():
            scale -= 0.1 * side.summed(scale.grad)
        scale.grad = None
    side.record("scale", scale)
