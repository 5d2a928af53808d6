"""What people do with gradients between backward and update, and with which parameters have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize import add_penalty, clip_grad_norm_
from tests.matrix.feature import at, change, feature
from tests.matrix.sides import Side

HOOKS_UNDER_ZERO3 = {"hook-not-run": "gradients are summed elsewhere than in the parameter under ZeRO 3"}


@at("gradients")
def clip(side: Side, number: int) -> None:
    side.clip(0.3)


@at("gradients")
def clip_largest(side: Side, number: int) -> None:
    side.clip(0.01, norm_type=float("inf"))


@at("gradients")
def clip_of_the_package(side: Side, number: int) -> None:
    clip_of = nn.utils.clip_grad_norm_ if side.alone else clip_grad_norm_
    side.record("norm", clip_of(side.model.parameters() if side.alone else side.model, 0.3))


@at("gradients")
def clip_of_torch(side: Side, number: int) -> None:
    norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.3)
    side.record("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


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


@at("gradients", needs={"causal"}, on=lambda axis: axis.ranks("pp") == 1)
def clip_by_parts(side: Side, number: int) -> None:
    """PyTorch's norm, and what clips to it, called apart."""
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


@at("gradients")
def clip_values(side: Side, number: int) -> None:
    nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)


@at("update")
def scaler(side: Side, number: int) -> None:
    """PyTorch's recipe with unscale and clip; the second step has infinite gradients, and none is stepped."""
    scaling = torch.amp.GradScaler("cpu", init_scale=16.0)
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(float("inf") if number == 1 else 16.0)
    for optimizer in side.optimizers:
        scaling.scale(torch.zeros(()))
        scaling.unscale_(optimizer)
    if number != 1:
        side.clip(0.3)
    for optimizer in side.optimizers:
        scaling.step(optimizer)
    scaling.update()
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    side.record("scale", scaling.get_scale())


@at("gradients")
def edited_gradients(side: Side, number: int) -> None:
    with torch.no_grad():
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@at("update")
def gradients_set_to_zero(side: Side, number: int) -> None:
    for optimizer in side.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def freezes(*parts: str) -> Callable[[nn.Module], nn.Module]:
    """What freezes parameters with one of the parts in their names."""

    def prepare(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.requires_grad_(False)
        return model

    return prepare


def _base_frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("norm", "ln_", ".1.")))
    return model


change("frozen", prepare=freezes("norm", "ln_", "embed", "wte", "shared"))
change("frozen_first_layer", prepare=freezes(".0."))
change("frozen_base", prepare=_base_frozen)  # the norms and the second layer train, on frozen ones


def _of_all_parameters(side: Side) -> None:
    side.optimizer(torch.optim.SGD, list(side.model.parameters()), momentum=0.9)


@at("between", prepare=freezes(".0."), optimizer=_of_all_parameters)
def unfrozen_later(side: Side, number: int) -> None:
    for parameter in side.like(".0.").values():
        parameter.requires_grad_(parameter.is_floating_point())


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


@at("between", apart={"second layer"})
def frozen_later(side: Side, number: int) -> None:
    for parameter in side.like(".1.").values():
        parameter.requires_grad_(False)


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


@at("gradients")
def penalty(side: Side, number: int) -> None:
    """L2 to the weights of before the step, L1 on what is no matrix, nothing on biases and what is frozen; hooks of a
    parameter see the gradient of the loss alone."""
    start = {name: 0.9 * p.detach() for name, p in side.named().items()}

    def decay(name: str, weight: Any) -> Any:
        if name.endswith("bias") or name not in trained:
            return None
        return (weight - start[name]).square().sum() if weight.ndim > 1 else 0.05 * weight.abs().sum()

    trained = {name: p for name, p in side.named().items() if p.requires_grad}
    if side.alone:
        leaves = {name: p.detach().requires_grad_() for name, p in trained.items() if not name.endswith("bias")}
        total = torch.stack([decay(name, leaf) for name, leaf in leaves.items()]).sum()
        total.backward()
        for name, leaf in leaves.items():
            trained[name].grad = leaf.grad if trained[name].grad is None else trained[name].grad + leaf.grad
    else:
        total = add_penalty(side.model, decay)  # of adapters too that came after the plan
    side.record("penalty", total)


@at("placed", refused=HOOKS_UNDER_ZERO3)
def gradient_hooks(side: Side) -> None:
    for parameter in side.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)


@feature()
def hooks_after_accumulation(side: Side) -> None:
    side.place()
    seen: list[str] = []
    for name, parameter in side.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    side.step(0)
    side.record("called", float(bool(seen)))
    side.update()


def _weights(side: Side) -> list[nn.Parameter]:
    """Without the codes of a quantized weight, which are no numbers."""
    return [parameter for parameter in side.model.parameters() if parameter.is_floating_point()]


@at("between")
def edited_weights(side: Side, number: int) -> None:
    with torch.no_grad():
        for parameter in _weights(side):
            parameter.mul_(0.9)


@at("between")
def weights_edited_by_data(side: Side, number: int) -> None:
    for parameter in _weights(side):
        parameter.data.mul_(0.9)


@at("between", needs={"causal"})
def weights_assigned(side: Side, number: int) -> None:
    """`parameter.data = values`, as for plain parameters."""
    for parameter in _weights(side):
        parameter.data = parameter.data * 0.9


@at("gradients", on=lambda axis: axis.ranks("pp") == 1)
def norm_of_each_gradient(side: Side, number: int) -> None:
    """As loggers do; a stage has the gradients of its own parameters. In one record, as some are zero but for
    rounding."""
    gradients = [parameter.grad for parameter in side.model.parameters() if parameter.grad is not None]
    side.record("norms", torch.stack([_full(gradient.norm()) for gradient in gradients]))
