"""Optimizers: each class that steps shards, their forms and parameter groups, and those that need full matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from parallelize import Muon, build_optimizer, local_optimizer
from tests.matrix.feature import at, change, feature
from tests.matrix.sides import Side
from tests.support.own_optimizers import BlockAdam, Lion, Shampoo

STABLE = {"eps": 1e-2}
"""Where a gradient is divided by its own size, rounding of the smallest ones would be all that is compared."""

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd_momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {**STABLE, "amsgrad": True}),
    "adamw": (optim.AdamW, {**STABLE, "weight_decay": 0.1}),
    "adamw_foreach": (optim.AdamW, {**STABLE, "foreach": True}),
    "adamw_fused": (optim.AdamW, {**STABLE, "fused": True}),
    "adagrad": (optim.Adagrad, STABLE),
    "adadelta": (optim.Adadelta, STABLE),
    "adamax": (optim.Adamax, STABLE),
    "nadam": (optim.NAdam, STABLE),
    "radam": (optim.RAdam, STABLE),
    "rmsprop": (optim.RMSprop, {**STABLE, "momentum": 0.5}),
    "asgd": (optim.ASGD, {}),
}

MEET = ("sgd_momentum", "adamw", "adamw_fused", "rmsprop")
"""Those that meet other rows: the others step element by element as these do."""

ALL_PARAMETERS = {"not-elementwise": "needs one vector of all parameters"}


def with_class(cls: Any, options: dict[str, Any], **planned: Any) -> Callable[[Side], None]:
    """planned: what `build_optimizer` is told of a class that it does not know."""

    def build(side: Side) -> None:
        side.optimizer(cls, **options, **({} if side.alone else planned))

    return build


def _without_biases(model: nn.Module) -> nn.Module:
    """A key's bias changes no attention: the sign of its gradient is that of rounding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    return model


for _name, (_cls, _options) in CLASSES.items():
    change(_name, optimizer=with_class(_cls, _options), meets=_name in MEET)

ADAFACTOR = (optim.Adafactor, {"eps": (1e-2, 1e-3)})
IN_FULL: dict[str, Any] = {
    "refused_with": {"torch_checkpoint": {"state-on-owner": "each rank has the states of what it steps in full"}}
}
change("adafactor", optimizer=with_class(*ADAFACTOR), **IN_FULL)
change("preconditioned", optimizer=with_class(Shampoo, {}, by_parameter=True), **IN_FULL)
change("states_in_blocks", optimizer=with_class(BlockAdam, {}, by_parameter=True), meets=False)
change("signs", optimizer=with_class(Lion, {}, elementwise=True), meets=False)
change("rprop", optimizer=with_class(optim.Rprop, {}), prepare=_without_biases)


@feature(refused=ALL_PARAMETERS)
def lbfgs(side: Side) -> None:
    side.place()
    optimizer = side.optimizer(optim.LBFGS, max_iter=1)
    side.step(0)
    optimizer.step(lambda: torch.tensor(1.0))
    optimizer.zero_grad()


@feature(one_rank=True, bound=2e-2)
def muon(side: Side) -> None:
    """Orthogonalized in bfloat16, so that rounding of the gradients shows."""
    side.place()
    side.optimizer(Muon, lr=0.02, adamw_lr=1e-3)
    side.step(0)
    side.update()


@at("optimizer")
def parameter_groups(side: Side) -> None:
    matrices = [p for p in side.model.parameters() if p.ndim > 1]
    others = [p for p in side.model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
    side.optimizer(optim.AdamW, groups, **STABLE)


@at("optimizer")
def two_optimizers(side: Side) -> None:
    matrices = [p for p in side.model.parameters() if p.ndim > 1]
    side.optimizer(optim.SGD, matrices, momentum=0.9)
    side.optimizer(optim.AdamW, [p for p in side.model.parameters() if p.ndim < 2], **STABLE)


@feature(needs={"causal"})
def group_added_later(side: Side) -> None:
    side.place()
    others = [p for p in side.model.parameters() if p.ndim < 2]
    optimizer = side.optimizer(optim.SGD, [p for p in side.model.parameters() if p.ndim > 1], momentum=0.9)
    side.step(0)
    side.update()
    optimizer.add_param_group({"params": others, "lr": 0.02})
    side.step(1)
    side.update()


@feature(needs={"causal"})
def closure(side: Side) -> None:
    side.place()
    optimizer = side.optimizer(optim.SGD, momentum=0.9)
    for number in range(2):
        optimizer.zero_grad()
        optimizer.step(lambda number=number: side.step(number))


@feature()
def learning_rate_schedule(side: Side) -> None:
    side.place()
    scheduler = optim.lr_scheduler.LambdaLR(side.optimizer(optim.SGD, momentum=0.5), lambda step: 1 / (1 + step))
    for number in range(3):
        side.step(number)
        side.update()
        scheduler.step()


@at("optimizer")
def optimizer_of_the_module(side: Side) -> None:
    """By the call that takes a module: that which trains, with adapters around the one that was planned."""
    sgd = {"lr": 0.05, "momentum": 0.9}
    built = optim.SGD([p for p in side.model.parameters() if p.requires_grad], **sgd) if side.alone else None
    side.optimizers.append(built or build_optimizer(side.model, optim.SGD, **sgd))


@at("optimizer")
def offloaded_state(side: Side) -> None:
    side.optimizer(optim.AdamW, **STABLE, **({} if side.alone else {"offload_state": True}))


@at(
    "optimizer",
    on=lambda axis: axis.ranks("dp", "dp_replicate", "pp") == 1,
    apart={"mesh"},
    refused_with={"dtype": {"unsharded-optimizer": "build_optimizer alone knows the float32 copies"}},
)
def local_steps(side: Side) -> None:
    """An optimizer of the user's own whose step runs on local tensors."""
    optimizer = optim.AdamW(side.model.parameters(), lr=0.05, **STABLE)
    side.optimizers.append(optimizer if side.alone else local_optimizer(optimizer))


@at("between")
def cleared_state(side: Side, number: int) -> None:
    for optimizer in side.optimizers:
        optimizer.state.clear()


@at("restored")
def state_round_trip(side: Side, folder: str) -> None:
    for optimizer in side.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
