"""What people do with gradients between backward and update, and with which parameters have one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelize import clip_grad_norm_
from tests.matrix.feature import feature
from tests.matrix.sides import Side

HOOKS_UNDER_ZERO3 = {"hook-not-run": "gradients are summed elsewhere than in the parameter under ZeRO 3"}


@feature()
def clip(side: Side) -> None:
    side.place()
    side.step(0)
    side.clip(0.3)
    side.update()
    side.step(1)
    side.clip(0.3)


@feature()
def clip_largest(side: Side) -> None:
    side.place()
    side.step(0)
    side.clip(0.01, norm_type=float("inf"))
    side.update()


@feature()
def clip_of_the_package(side: Side) -> None:
    side.place()
    side.step(0)
    clip_of = nn.utils.clip_grad_norm_ if side.alone else clip_grad_norm_
    side.record("norm", clip_of(side.model.parameters() if side.alone else side.model, 0.3))
    side.update()


@feature()
def clip_of_torch(side: Side) -> None:
    side.place()
    side.step(0)
    norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.3)
    side.record("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    side.update()


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@feature()
def clip_by_every_call(side: Side) -> None:
    """One after the other to ever smaller norms, of two orders, of the model's parameters and of the optimizer's."""
    side.place()
    optimizer = side.optimizer()
    side.step(0)
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip_of = nn.utils.clip_grad_norm_ if side.alone else clip_grad_norm_
    most = 0.3
    for parameters in (list(side.model.parameters()), stepped):
        for call, options in ((clip_of, {}), *((nn.utils.clip_grad_norm_, {"foreach": how}) for how in (False, True))):
            for order in (2.0, float("inf")):
                side.record("norm", _full(call(parameters, most, order, **options)))
                most *= 0.7
    scaling = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaling.scale(torch.ones(()))
    scaling.unscale_(optimizer)
    side.record("norm", _full(nn.utils.clip_grad_norm_(side.model.parameters(), most)))


@feature(needs={"causal"}, on=lambda axis: axis.ranks("pp") == 1)
def clip_by_parts(side: Side) -> None:
    """PyTorch's norm, and what clips to it, called apart."""
    side.place()
    side.step(0)
    parameters = list(side.model.parameters())
    norm = _full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    side.record("norm", norm)
    nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)


SHARED_AND_TIED = {
    "llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "hybrid": {"num_key_value_heads": 1},
    "mixture": {"num_key_value_heads": 1},
}


@feature(overrides=SHARED_AND_TIED)
def clip_of_shared_and_frozen(side: Side) -> None:
    """One key/value head on all ranks, a tie that may be on two stages, and norms that do not train."""
    for parameter in side.like("norm", "ln_").values():
        parameter.requires_grad_(False)
    side.place()
    side.step(0)
    side.clip(0.3)
    side.clip(0.01, norm_type=float("inf"))
    side.update()
    side.step(1)


@feature()
def clip_values(side: Side) -> None:
    side.place()
    side.step(0)
    nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)
    side.update()


@feature()
def scaler(side: Side) -> None:
    """PyTorch's recipe with unscale and clip; the second step has an infinite gradient on the last data rank's rows."""
    side.place()
    optimizer = side.optimizer(torch.optim.SGD, momentum=0.9)
    scaling = torch.amp.GradScaler("cpu", init_scale=16.0)
    for number in range(3):
        side.step(number)
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(float("inf") if number == 1 else 16.0)
        scaling.scale(torch.zeros(()))
        scaling.unscale_(optimizer)
        if number != 1:
            side.clip(0.3)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
    side.record("scale", scaling.get_scale())


@feature()
def edited_gradients(side: Side) -> None:
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.grad.mul_(0.5)
    side.update()
    side.step(1)


@feature()
def gradients_set_to_zero(side: Side) -> None:
    side.place()
    optimizer = side.optimizer()
    side.step(0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    side.step(1)


@feature()
def frozen(side: Side) -> None:
    """Norms and the embedding are frozen before the plan."""
    for name, parameter in side.model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("norm", "ln_", "embed", "wte", "shared")))
    side.place()
    side.train()


@feature()
def frozen_first_layer(side: Side) -> None:
    for parameter in side.like(".0.").values():
        parameter.requires_grad_(False)
    side.place()
    side.train()


@feature()
def frozen_base(side: Side) -> None:
    """The norms and the second layer train, on frozen ones."""
    for name, parameter in side.model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("norm", "ln_", ".1.")))
    side.place()
    side.train()


@feature()
def unfrozen_later(side: Side) -> None:
    for parameter in side.like(".0.").values():
        parameter.requires_grad_(False)
    side.place()
    side.optimizer(torch.optim.SGD, list(side.model.parameters()), momentum=0.9)
    side.step(0)
    side.update()
    for parameter in side.like(".0.").values():
        parameter.requires_grad_(True)
    side.step(1)
    side.update()
    side.step(2)


@feature()
def unfrozen_ends(side: Side) -> None:
    """The embedding and the head, which may be one parameter with copies on two stages, and the norms beside them."""
    ends = ("embed", "wte", "shared", "head", "norm", "ln_f", "classifier")
    for parameter in side.like(*ends).values():
        parameter.requires_grad_(False)
    side.place()
    side.optimizer(torch.optim.SGD, list(side.model.parameters()), momentum=0.9)
    side.step(0)
    side.update()
    for parameter in side.like(*ends).values():
        parameter.requires_grad_(True)
    side.step(1)
    side.update()
    side.step(2)


@feature()
def frozen_by_turns(side: Side) -> None:
    """All parameters, or half of them: also those of a whole stage, whose outputs then need no gradient."""
    names = list(side.named())
    first = set(names[: len(names) // 2])
    side.place()
    for trained in ("last", "all", "first", "last"):
        for name, parameter in side.named().items():
            is_first = name in first or name not in names  # a copy of a tied one on a later stage
            parameter.requires_grad_(trained == "all" or is_first == (trained == "first"))
            parameter.grad = None
        side.step(0)
        side.evaluate(1)
        side.record_gradients()


@feature()
def added_group(side: Side) -> None:
    """Parameters that train later, and join the optimizer then."""
    later = side.like(".0.").keys()
    for parameter in side.like(".0.").values():
        parameter.requires_grad_(False)
    side.place()
    optimizer = side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    side.update()
    joined = [parameter for name, parameter in side.named().items() if name in later]
    for parameter in joined:
        parameter.requires_grad_(True)
    if joined:
        optimizer.add_param_group({"params": joined, "lr": 0.02})
    side.step(1)
    side.update()
    side.step(2)


@feature()
def frozen_later(side: Side) -> None:
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    side.update()
    for parameter in side.like(".1.").values():
        parameter.requires_grad_(False)
    side.step(1)
    side.update()
    side.step(2)


@feature()
def frozen_with_a_gradient(side: Side) -> None:
    """A parameter that requires none any more by the time that its gradient is stepped."""
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    for parameter in side.like(".1.").values():
        parameter.requires_grad_(False)
    side.optimizers[0].step()
    side.optimizers[0].zero_grad(set_to_none=False)
    side.update()  # by momentum alone, as gradients are zeros
    for parameter in side.like(".1.").values():
        parameter.requires_grad_(True)
    side.step(1)


@feature()
def penalty(side: Side) -> None:
    """L2 to the weights of the start, L1 on what is no matrix, nothing on biases."""
    side.place()
    start = {name: 0.9 * p.detach() for name, p in side.named().items()}

    def decay(name: str, weight: Any) -> Any:
        if name.endswith("bias"):
            return None
        return (weight - start[name]).square().sum() if weight.ndim > 1 else 0.05 * weight.abs().sum()

    side.step(0)
    if side.alone:
        values = [decay(name, p) for name, p in side.named().items() if not name.endswith("bias")]
        total = torch.stack(values).sum()
        total.backward()
    else:
        total = side.parallel.add_penalty(decay)
    side.record("penalty", total)


@feature(refused=HOOKS_UNDER_ZERO3)
def gradient_hooks(side: Side) -> None:
    side.place()
    for parameter in side.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    side.train()


@feature()
def hooks_after_accumulation(side: Side) -> None:
    side.place()
    seen: list[str] = []
    for name, parameter in side.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    side.step(0)
    side.record("called", float(bool(seen)))
    side.update()


@feature()
def edited_weights(side: Side) -> None:
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    side.update()
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(0.9)
    side.step(1)
    side.update()


@feature()
def weights_edited_by_data(side: Side) -> None:
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    side.update()
    for parameter in side.model.parameters():
        parameter.data.mul_(0.9)
    side.step(1)
    side.update()


@feature(needs={"causal"})
def weights_assigned(side: Side) -> None:
    """`parameter.data = values`, as for plain parameters."""
    side.place()
    side.step(0)
    side.update()
    for parameter in side.model.parameters():
        parameter.data = parameter.data * 0.9
    side.step(1)
    side.update()


@feature(on=lambda axis: axis.ranks("pp") == 1)
def norm_of_each_gradient(side: Side) -> None:
    """As loggers do; a stage has the gradients of its own parameters."""
    side.place()
    side.step(0)
    for name, parameter in side.model.named_parameters():
        if parameter.grad is not None:
            norm = parameter.grad.norm()
            side.record(f"norm of {name}", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
