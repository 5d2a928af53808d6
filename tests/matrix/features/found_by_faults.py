"""Rows that a seeded fault has asked for: without them no cell differed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import cross_entropy
from tests.matrix.axes import Axis
from tests.matrix.feature import at, change, feature
from tests.matrix.features.forwards import DROPOUT, layers_of
from tests.matrix.features.losses import NOT_BY_HAND, by_hand
from tests.matrix.kinds import logits_of, summed_loss
from tests.matrix.sides import Side

ONE_KEY_HEAD = {kind: {"num_key_value_heads": 1} for kind in ("llama", "mixture", "hybrid")}


@feature(refused=NOT_BY_HAND, needs={"text"})
def mean_of_the_package(side: Side) -> None:
    """The mean that `cross_entropy` takes itself, over all data ranks."""
    side.place()
    logits, targets = logits_of(side.forward()), side.split(side.targets())
    if side.alone:
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    else:
        loss = cross_entropy(logits, targets, mesh=side.mesh)
    loss.backward()
    side.record("loss", side.summed(loss))


@at("gradients")
def clip_of_order_three(side: Side, number: int) -> None:
    side.clip(0.01, norm_type=3.0)


# fewer key heads than ranks that divide the query heads
change("one_key_head", needs={"text", "stock"}, overrides=ONE_KEY_HEAD)


@feature()
def weights_in_new_storage(side: Side) -> None:
    """A cast there and back after the optimizer was built: the parameters are the same, and their storage is not."""
    side.place()
    side.optimizer(torch.optim.SGD, momentum=0.9)
    side.model.float().double()
    side.train()
    side.clip(0.3)


@feature(
    one_rank=True,
    refused=NOT_BY_HAND,
    needs={"stock", "text"},
    without={"recurrent"},
    overrides={**DROPOUT, "": {}, **dict.fromkeys(("llama", "llama_equal", "mixture"), DROPOUT[""])},
)
def dropout_by_hand(side: Side) -> None:
    """Forwards count steps themselves."""
    side.place()
    for number in range(2):
        by_hand(side, number)


def _on_data_axes(axis: Axis) -> bool:
    return axis.data_ranks == axis.world_size


def _with_unused_layer(model: nn.Module) -> nn.Module:
    model.add_module("unused", nn.Linear(4, 6).double())
    return model


UNCLAIMED = {"unclaimed-parameter": "a rule of the plan must name each parameter"}


# no rank uses it, so that it gets no gradient
change(
    "unused_layer",
    prepare=_with_unused_layer,
    on=_on_data_axes,
    refused=UNCLAIMED,
    apart={"adapter"},  # which all linears would have, and this one no rule
)


@feature(rounds=torch.bfloat16, without={"experts", "recurrent"})
def masters(side: Side) -> None:
    """Compute in bfloat16, with steps so large that weights of before show in the loss."""
    side.place(dtype="bfloat16")
    side.optimizer(torch.optim.SGD, lr=0.5)
    side.train(3)
    side.update()


@feature(rounds=torch.bfloat16, without={"experts", "recurrent"})
def masters_after_an_edit(side: Side) -> None:
    side.place(dtype="bfloat16")
    side.optimizer(torch.optim.SGD)
    side.step(0)
    side.update()
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(0.5)
    side.step(1)
    side.update()


@feature(on=lambda axis: axis.ranks("pp") == 1)
def error_in_a_later_microbatch(side: Side) -> None:
    """The microbatches before it have left their gradients, which the next step must not have."""
    side.place(num_microbatches=2, schedule="1f1b")
    calls = [0]

    def fail(module: nn.Module, inputs: Any) -> None:
        calls[0] += 1
        if side.alone or calls[0] == 2:
            raise RuntimeError("deliberate")

    handle = layers_of(side)[1].register_forward_pre_hook(fail)
    try:
        side.step(0)
    except Exception as error:
        assert "deliberate" in str(error), error
    handle.remove()
    for parameter in side.model.parameters():
        parameter.grad = None
    side.step(1)


@at("around")
def gradients_replaced_and_reset(side: Side, number: int, step: Any) -> None:
    """Between two backwards that add up: other tensors in the place of some gradients, and none in that of others."""
    step(number)
    for name, parameter in side.named().items():
        if parameter.grad is not None:
            parameter.grad = None if name.endswith("bias") else parameter.grad * 0.5
    step(number + 1)


def _steps_with_overflow(side: Side, optimizer: torch.optim.Optimizer, unscales: bool) -> None:
    scaling = torch.amp.GradScaler("cpu", init_scale=16.0)
    side.step(0)
    if side.alone or dist.get_rank() == 0:
        gradients = [p.grad for p in side.model.parameters() if p.grad is not None]
        first: Any = gradients[0]
        (first.to_local() if isinstance(first, DTensor) else first).view(-1)[0] = float("inf")
    scaling.scale(torch.zeros(()))
    if unscales:
        scaling.unscale_(optimizer)
    scaling.step(optimizer)
    scaling.update()
    side.record("scale", scaling.get_scale())
    optimizer.zero_grad()
    side.step(1)


@feature()
def overflow_on_one_rank(side: Side) -> None:
    """A gradient is infinite where the first rank stores it; no rank may step then."""
    side.place()
    _steps_with_overflow(side, side.optimizer(torch.optim.SGD, momentum=0.9), unscales=True)


@feature(needs={"causal", "stock"}, without={"recurrent", "experts"})
def overflow_before_unscaling(side: Side) -> None:
    side.place()
    _steps_with_overflow(side, side.optimizer(torch.optim.SGD, momentum=0.9), unscales=False)


@feature(
    needs={"causal", "stock"},
    without={"recurrent", "experts"},
    on=lambda axis: axis.ranks("dp", "dp_replicate", "cp") == 1,
)
def overflow_of_an_optimizer_of_pytorch(side: Side) -> None:
    """Built by its class, not by the package, where no rank has the gradient that another one has too."""
    side.place()
    _steps_with_overflow(side, torch.optim.SGD(side.model.parameters(), lr=0.1), unscales=False)


def _before_zero3(axis: Axis) -> bool:
    return _on_data_axes(axis) and axis.options.get("zero", 0) < 3


@feature(prepare=_with_unused_layer, on=_before_zero3, refused=UNCLAIMED)
def layer_of_the_first_rank(side: Side) -> None:
    """Only the first data rank uses it: the others get its gradient."""
    side.place()
    loss = summed_loss(side.forward(), side.targets()) / side.count()
    if side.alone or side.data_rank == 0:
        loss = loss + side.model.unused(torch.ones(4, dtype=torch.float64)).square().sum()
    loss.backward()
    side.record("loss", side.summed(loss))
