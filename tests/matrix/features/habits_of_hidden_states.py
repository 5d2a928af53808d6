"""Loops that read or replace hidden states: penalties, teachers, contrasts, embeddings that are mixed or attacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.matrix.axes import Axis
from tests.matrix.features.forwards import layers_of
from tests.matrix.habits import descend, frozen, habit, tokens, whole_model, whole_sequences
from tests.matrix.kinds import LENGTH, ROWS, logits_of
from tests.matrix.sides import Side

T = torch.Tensor
DECODERS = {"needs": {"causal", "stock"}}
PARTS = {
    **DECODERS,
    "refused": {
        "outside-context": "over cp a layer learns the length of the sequences from the model's forward",
    },
}


def _hidden(side: Side, number: int = 0, model: Any = None) -> list[T]:
    """[rows, tokens, width] after each layer."""
    own, side.model = side.model, model or side.model
    try:
        return list(side.forward(number, output_hidden_states=True).hidden_states)
    finally:
        side.model = own


def _embeds(number: int, width: int) -> T:
    generator = torch.Generator().manual_seed(300 + number)
    return torch.randn(ROWS, LENGTH, width, generator=generator, dtype=torch.float64)


@habit(**PARTS, on=whole_model)
def penalty_on_hidden_states(side: Side) -> None:
    side.place()
    for number in range(2):
        output = side.forward(number, output_hidden_states=True)
        loss = side.summed_loss(output, side.targets(number)) / side.count(number)
        descend(side, loss + 1e-3 * sum(h.square().mean(-1).sum() for h in output.hidden_states) / (ROWS * LENGTH))


@habit(**PARTS, on=whole_model, others=(None,))
def teacher_of_hidden_states(side: Side) -> None:
    """The mean square distance of the last two hidden states from those of a frozen model."""
    side.place()
    teacher = frozen(side)
    with torch.no_grad():
        wanted = _hidden(side, model=teacher)[-2:]
    loss = sum((a - b).square().sum() for a, b in zip(_hidden(side)[-2:], wanted, strict=True))
    descend(side, loss / (ROWS * LENGTH))


@habit(on=whole_model, others=(None,))
def teacher_that_follows(side: Side) -> None:
    """Its weights are a moving average of the student's, which learns its probabilities."""
    side.place()
    teacher = frozen(side)
    for number in range(2):
        with torch.no_grad():
            wanted = tokens(side, number, teacher).logits.softmax(-1)
        read = tokens(side, number)
        descend(side, read.mean(-(wanted * read.logits.log_softmax(-1)).sum(-1)))
        with torch.no_grad():
            for average, weight in zip(teacher.parameters(), side.model.parameters(), strict=True):
                average.lerp_(weight, 0.5)
    for name, weight in side.beside(teacher).every_weight().items():
        side.record(f"weight {name} of the teacher", weight)


@habit(**PARTS, on=whole_sequences)
def similar_pairs(side: Side) -> None:
    """Two forwards of one model; the cosine of their mean states."""
    side.place()
    first, second = (_hidden(side, number)[-1].mean(1) for number in range(2))
    descend(side, (1 - F.cosine_similarity(first, second)).sum() / ROWS)


def _over_data_alone(axis: Axis) -> bool:
    return axis.sizes.keys() == {"dp"}


class _Gathered(torch.autograd.Function):
    """The rows of all data ranks, in their order; backward keeps this rank's rows of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: T, group: Any) -> T:
        ctx.group, ctx.number = group, len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.number
        return grad[first : first + ctx.number], None


@habit(**DECODERS, on=_over_data_alone)
def contrast_over_all_ranks(side: Side) -> None:
    """Each row is told from the rows of all ranks, which are gathered with their gradients."""
    side.place()
    first, second = (F.normalize(_hidden(side, number)[-1].mean(1)) for number in range(2))
    own, every = torch.arange(ROWS), second
    if not side.alone and side.axis.data_ranks > 1:
        every = _Gathered.apply(second, side.mesh.get_group("dp"))
        own = side.local(own)
    descend(side, F.cross_entropy(first @ every.T / 0.1, own, reduction="sum") / ROWS)


def _base_and_head(side: Side) -> tuple[nn.Module, nn.Module]:
    return side.model.base_model, side.model.get_output_embeddings()


@habit(**PARTS, on=whole_model)
def base_and_head_apart(side: Side) -> None:
    """The base model is called, and its head on what it returns."""
    side.place()
    base, head = _base_and_head(side)
    for number in range(2):
        hidden = base(**side.inputs(number), use_cache=False).last_hidden_state
        descend(side, side.summed_loss(head(hidden), side.targets(number)) / side.count(number))


@habit(**PARTS, on=whole_sequences)
def two_tokens_ahead(side: Side) -> None:
    """The head is called twice: for the next token, and for the one after it."""
    side.place()
    base, head = _base_and_head(side)
    hidden = base(**side.inputs(), use_cache=False).last_hidden_state
    targets = side.targets()
    loss = side.summed_loss(head(hidden), targets) + 0.3 * side.summed_loss(head(hidden[:, :-1]), targets[:, 1:])
    descend(side, loss / side.count())


@habit(**PARTS, on=whole_model)
def exit_of_each_layer(side: Side) -> None:
    """The head reads the state after each layer, and all of its losses are added."""
    side.place()
    output = side.forward(0, output_hidden_states=True)
    head = side.model.get_output_embeddings()
    losses = [side.summed_loss(head(hidden), side.targets()) for hidden in output.hidden_states[1:]]
    descend(side, sum(losses) / side.count())


@habit(**PARTS, on=whole_model)
def embeddings_of_ids_by_hand(side: Side) -> None:
    """The model's own table is called, and what it returns is passed in the place of ids."""
    side.place()
    for number in range(2):
        embeds = side.model.get_input_embeddings()(side.inputs(number)["input_ids"])
        output = side.model(inputs_embeds=embeds, use_cache=False)
        descend(side, side.summed_loss(output, side.targets(number)) / side.count(number))


@habit(**DECODERS, on=whole_model)
def mixed_embeddings(side: Side) -> None:
    """Mixup: each row is mixed with its neighbor, and so are the two losses."""
    side.place()
    width = side.model.config.hidden_size
    embeds, targets = side.local(_embeds(0, width)), side.targets()
    partner = torch.arange(len(embeds)).view(-1, 2).flip(1).flatten() if len(embeds) > 1 else torch.arange(1)
    output = side.model(inputs_embeds=0.7 * embeds + 0.3 * embeds[partner], use_cache=False)
    loss = 0.7 * side.summed_loss(output, targets) + 0.3 * side.summed_loss(output, targets[partner])
    descend(side, loss / side.count())


@habit(**PARTS, on=whole_sequences)
def prefix_of_embeddings(side: Side) -> None:
    """Two states before the tokens, as of an image; their logits are dropped."""
    side.place()
    width = side.model.config.hidden_size
    for number in range(2):
        ids = side.inputs(number)["input_ids"]
        prefix = side.local(_embeds(number, width))[:, :2]
        embeds = torch.cat([prefix, side.model.get_input_embeddings()(ids)], dim=1)
        logits = logits_of(side.model(inputs_embeds=embeds, use_cache=False))
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        loss = F.cross_entropy(logits[:, 2:].flatten(0, 1), side.targets(number).flatten(), reduction="sum")
        descend(side, loss / side.count(number))


@habit(**DECODERS, on=whole_sequences)
def gradient_of_inputs(side: Side) -> None:
    """How much each position matters: the gradient of the loss by embeddings, without one of the weights."""
    side.place()
    embeds = side.local(_embeds(0, side.model.config.hidden_size)).requires_grad_()
    loss = side.summed_loss(side.model(inputs_embeds=embeds, use_cache=False), side.targets()) / side.count()
    (gradient,) = torch.autograd.grad(loss, embeds)
    side.record("gradient of inputs", side.whole(gradient))
    side.train()


@habit(**DECODERS, on=whole_sequences)
def attacked_inputs(side: Side) -> None:
    """Adversarial training: a first backward finds the worst direction of the inputs, a second one trains on it."""
    side.place()
    embeds = side.local(_embeds(0, side.model.config.hidden_size)).requires_grad_()
    loss = side.summed_loss(side.model(inputs_embeds=embeds, use_cache=False), side.targets()) / side.count()
    loss.backward()
    worse = (embeds + 0.1 * F.normalize(embeds.grad, dim=-1)).detach()
    loss = side.summed_loss(side.model(inputs_embeds=worse, use_cache=False), side.targets()) / side.count()
    descend(side, loss)


@contextmanager
def _outputs_of_layers(side: Side) -> Iterator[list[T]]:
    """What the layers return, while the block runs."""
    outputs: list[T] = []
    handles = [
        layer.register_forward_hook(
            lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in layers_of(side)
    ]
    yield outputs
    for handle in handles:
        handle.remove()


def _whole_activations(axis: Axis) -> bool:
    """Whether a layer returns every token of its rows."""
    return whole_sequences(axis) and not axis.options.get("sequence_parallel", False)


@habit(on=_whole_activations)
def activations_that_are_logged(side: Side) -> None:
    """The mean square of what each layer returns."""
    side.place()
    with _outputs_of_layers(side) as outputs:
        read = tokens(side)
    for output in outputs:
        side.record("activations", side.summed(output.square().sum()) / (ROWS * LENGTH))
    descend(side, read.mean(read.losses))


@habit(on=_whole_activations)
def activations_in_the_loss(side: Side) -> None:
    """What hooks have seen is a part of the loss."""
    side.place()
    with _outputs_of_layers(side) as outputs:
        read = tokens(side)
    penalty = sum(output.square().mean(-1).sum() for output in outputs) / (ROWS * LENGTH)
    descend(side, read.mean(read.losses) + 1e-3 * penalty)
