"""What people do to gradients and weights between backward and update, beyond clipping: each a loop of some library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.matrix.habits import descend, full, habit, stored_alike, tokens, whole_model
from tests.matrix.sides import Side

T = torch.Tensor
DECODERS = {"needs": {"causal", "stock"}}


def _trained(side: Side) -> Iterable[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in side.model.named_parameters() if p.grad is not None]


def _norm(tensors: Iterable[Any]) -> T:
    return torch.stack([full(tensor.square().sum()) for tensor in tensors]).sum().sqrt()


@habit(on=stored_alike)
def sharpness_aware(side: Side) -> None:
    """Two backwards: at the weights, and where the loss is worst near them; the second gradient is stepped."""
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    for number in range(2):
        side.step(number)
        norm = _norm(p.grad for _, p in _trained(side))
        moved = {name: 0.05 * p.grad / norm for name, p in _trained(side)}
        with torch.no_grad():
            for name, parameter in _trained(side):
                parameter.add_(moved[name])
        side.optimizers[0].zero_grad()
        side.step(number)
        with torch.no_grad():
            for name, parameter in _trained(side):
                parameter.sub_(moved[name])
        side.update()


@habit(on=whole_model)
def gradients_of_two_tasks(side: Side) -> None:
    """Gradient surgery: of two gradients that point apart, each loses its part along the other."""
    side.place()
    gradients: list[dict[str, Any]] = []
    for number in range(2):
        side.step(number)
        gradients.append({name: p.grad.clone() for name, p in _trained(side)})
        side.model.zero_grad()
    first, second = gradients
    for name, parameter in side.named().items():
        if name not in first:
            continue
        one, other = first[name], second[name]
        dot, square = full((one * other).sum()), full(other.square().sum())
        apart = (dot < 0) * dot / square.clamp(min=1e-12)
        parameter.grad = one + other - apart * other
    side.record_gradients()
    side.update()


@habit(on=whole_model)
def centered_gradients(side: Side) -> None:
    """Of each matrix the mean of every row is taken from its gradient."""
    side.place()
    for number in range(2):
        side.step(number)
        with torch.no_grad():
            for _, parameter in _trained(side):
                if parameter.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(dim=-1, keepdim=True))
        side.update()


@habit(on=stored_alike)
def decay_by_hand(side: Side) -> None:
    """A part of the weights is added to the gradients."""
    side.place()
    for number in range(2):
        side.step(number)
        with torch.no_grad():
            for _, parameter in _trained(side):
                parameter.grad.add_(parameter, alpha=0.1)
        side.update()


@habit(on=whole_model)
def each_gradient_clipped(side: Side) -> None:
    side.place()
    side.step(0)
    for _, parameter in _trained(side):
        nn.utils.clip_grad_norm_([parameter], 0.01)
    side.update()


@habit(on=whole_model)
def groups_clipped_apart(side: Side) -> None:
    """Matrices and vectors by norms of their own, each logged."""
    side.place()
    side.step(0)
    for matrices in (True, False):
        group = [p for _, p in _trained(side) if (p.ndim > 1) == matrices]
        side.record("norm of a group", full(nn.utils.clip_grad_norm_(group, 0.05)))
    side.update()


@habit(on=whole_model)
def norms_of_layers(side: Side) -> None:
    """What a logger shows: the norm of each layer's gradients and weights."""
    side.place()
    for number in range(2):
        side.step(number)
        for part in (".0.", ".1."):
            side.record("gradients of a layer", _norm(p.grad for name, p in _trained(side) if part in name))
            side.record("weights of a layer", _norm(p.detach() for name, p in _trained(side) if part in name))
        side.update()


@habit(on=whole_model)
def largest_gradients(side: Side) -> None:
    side.place()
    side.step(0)
    for name, parameter in _trained(side):
        side.record(f"largest of {name}", full(parameter.grad.abs().max()))


@habit(on=whole_model)
def size_of_updates(side: Side) -> None:
    """How far each parameter moves, by its own norm."""
    side.place()
    side.step(0)
    before = {name: p.detach().clone() for name, p in _trained(side)}
    names = list(before)
    side.update()
    for name in names:
        weight = side.named()[name].detach()
        side.record(f"update of {name}", _norm([weight - before[name]]) / _norm([weight]))


@habit(**DECODERS, on=stored_alike)
def trained_rows_of_the_embedding(side: Side) -> None:
    """Only new tokens learn: gradients of the others are multiplied by a mask of full rows."""
    side.place()
    side.step(0)
    weight = side.model.get_input_embeddings().weight
    mask = (torch.arange(weight.shape[0]) >= 40).double().unsqueeze(1)
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mask = distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.grad.mul_(mask)
    side.update()
    side.step(1)


@habit()
def clamped_weights(side: Side) -> None:
    side.place()
    for number in range(2):
        side.step(number)
        side.update()
        for parameter in side.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


@habit(on=stored_alike)
def pruned_by_size(side: Side) -> None:
    """Small weights become zero, and stay so: their gradients do too."""
    side.place()
    for number in range(2):
        side.step(number)
        with torch.no_grad():
            for parameter in side.model.parameters():
                kept = parameter.abs() > 0.02
                parameter.mul_(kept)
                if parameter.grad is not None:
                    parameter.grad.mul_(kept)
        side.update()


def _stepped_by_hand(update: Callable[[Any, dict[str, Any]], None]) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        side.place()
        state: dict[str, dict[str, Any]] = {}
        for number in range(3):
            side.step(number)
            with torch.no_grad():
                for name, parameter in _trained(side):
                    update(parameter, state.setdefault(name, {}))
                    parameter.grad = None

    return run


def _descent(parameter: Any, state: dict[str, Any]) -> None:
    parameter -= 0.05 * parameter.grad


def _sign(parameter: Any, state: dict[str, Any]) -> None:
    parameter.sub_(1e-3 * (parameter.grad.abs() > 1e-6) * parameter.grad.sign())


def _momenta(parameter: Any, state: dict[str, Any]) -> None:
    """Adam, written down."""
    gradient = parameter.grad
    step = state["step"] = state.get("step", 0) + 1
    first = state["first"] = 0.9 * state.get("first", 0.0 * gradient) + 0.1 * gradient
    second = state["second"] = 0.99 * state.get("second", 0.0 * gradient) + 0.01 * gradient * gradient
    parameter.sub_(1e-3 * (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-2))


for _name, _update in {"descent_by_hand": _descent, "sign_descent": _sign, "adam_by_hand": _momenta}.items():
    habit(name=_name, on=stored_alike)(_stepped_by_hand(_update))


@habit()
def gradients_summed_by_hand(side: Side) -> None:
    """Accumulation without `.grad`: sums in a dict, and what is stepped is set from it."""
    side.place()
    sums: dict[str, Any] = {}
    for number in range(2):
        side.step(number)
        for name, parameter in _trained(side):
            sums[name] = sums.get(name, 0.0) + 0.5 * parameter.grad
            parameter.grad = None
    for name, parameter in side.named().items():
        parameter.grad = sums.get(name)
    side.record_gradients()
    side.update()


@habit()
def steps_that_are_skipped(side: Side) -> None:
    """A step whose norm is too large is not taken, with its gradients dropped."""
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    norms = []
    for number in range(3):
        side.step(number)
        norm = side.clip(1e9)
        norms.append(float(norm))
        if number == 1 or norm > 1e6:
            side.optimizers[0].zero_grad()
            continue
        side.update()
    side.record("norms", torch.tensor(norms, dtype=torch.float64))


@habit()
def rolled_back(side: Side) -> None:
    """Weights and the optimizer's state as they were before a step that turned out badly."""
    side.place()
    optimizer = side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    side.update()
    weights = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    state = {
        p: {key: value.clone() for key, value in kept.items() if isinstance(value, torch.Tensor)}
        for p, kept in optimizer.state.items()
    }
    side.step(1)
    side.update()
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.copy_(weights[name])
    for parameter, kept in state.items():
        for key, value in kept.items():
            optimizer.state[parameter][key].copy_(value)
    side.step(2)
    side.update()


@habit()
def slow_weights(side: Side) -> None:
    """Lookahead: after every second step the weights go back half-way to where they were."""
    side.place()
    slow = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    for number in range(4):
        side.step(number)
        side.update()
        if number % 2:
            with torch.no_grad():
                for name, parameter in side.model.named_parameters():
                    slow[name].lerp_(parameter, 0.5)
                    parameter.copy_(slow[name])


@habit()
def averages_in_a_dict(side: Side) -> None:
    """A moving average that is swapped in for an evaluation, and out again."""
    side.place()
    average = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    for number in range(2):
        side.step(number)
        side.update()
        for name, parameter in side.model.named_parameters():
            average[name].mul_(0.75).add_(parameter.detach(), alpha=0.25)
    own = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    for weights in (average, own):
        with torch.no_grad():
            for name, parameter in side.model.named_parameters():
                parameter.copy_(weights[name])
        side.evaluate(2)
    side.step(2)


@habit(on=whole_model)
def noise_of_the_weights(side: Side) -> None:
    """Weights are moved for one backward by a function of themselves, and moved back before the update."""
    side.place()
    moved = {name: 0.05 * p.detach().abs() for name, p in side.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.add_(moved[name])
    read = tokens(side)
    loss = read.mean(read.losses)
    loss.backward()
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.sub_(moved[name])
    side.record("loss", side.summed(loss))
    side.update()


@habit(**DECODERS, on=stored_alike)
def attacked_embedding(side: Side) -> None:
    """The table is moved along its gradient for a second backward, which adds to the first."""
    side.place()
    read = tokens(side)
    read.mean(read.losses).backward()
    weight = side.model.get_input_embeddings().weight
    moved = 0.5 * weight.grad / _norm([weight.grad])
    with torch.no_grad():
        weight.add_(moved)
    read = tokens(side)
    read.mean(read.losses).backward()
    with torch.no_grad():
        weight.sub_(moved)
    side.update()
    read = tokens(side, 1)
    descend(side, read.mean(read.losses))
