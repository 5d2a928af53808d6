"""What rows of habits share: the meshes that they run on, and what a loss written by hand reads and does.

Habits are shapes of loops, so that three kinds of decoders and each axis tell whether one is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.matrix.axes import AXES, Axis
from tests.matrix.feature import feature
from tests.matrix.kinds import IGNORED, logits_of
from tests.matrix.sides import Side

T = torch.Tensor
_NAMES = "dp-zero0 dp-zero1 dp-zero2 dp-zero3 tp tp-sp-lp cp-ring pp-1f1b dp-tp-zero1"
MESHES = [AXES[name] for name in _NAMES.split()]


def habit(on: Callable[[Axis], bool] = lambda axis: True, **facts: Any) -> Callable[[Any], Any]:
    """A row of decoders without experts and recurrences, on the meshes of habits that `on` allows; sizes that coincide
    are for other rows."""
    return feature(**of_habit(on, **facts))


def of_habit(on: Callable[[Axis], bool] = lambda axis: True, **facts: Any) -> dict[str, Any]:
    """What every habit has, for one that is a change of the loop of all."""
    here = {"needs": {"causal"}, "without": {"experts", "recurrent", "sizes"}, **facts}
    return {"on": lambda axis: axis in MESHES and on(axis), **here}


def whole_model(axis: Axis) -> bool:
    """Whether a rank has all layers, so that a loop can call the model; what a stage computes runs in `step`."""
    return axis.ranks("pp") == 1


def whole_sequences(axis: Axis) -> bool:
    """Whether a rank has all tokens of a sequence."""
    return whole_model(axis) and axis.ranks("cp") == 1


def stored_alike(axis: Axis) -> bool:
    """Whether a gradient is stored as its parameter is: under ZeRO 2 the data axes shard it alone, and PyTorch adds no
    DTensor to a plain tensor."""
    return whole_model(axis) and axis.options.get("zero") != 2


@dataclass
class Tokens:
    """What a loss reads.

    Attributes:
        logits: [rows, tokens, V], full. ids: [rows, tokens], the targets, 0 where there is none. valid: where there is.
        count: targets of all ranks.
    """

    logits: T
    ids: T
    valid: T
    count: int

    @property
    def losses(self) -> T:
        """[rows, tokens], 0 where there is no target."""
        losses = F.cross_entropy(self.logits.flatten(0, 1), self.ids.flatten(), reduction="none")
        return losses.view(self.ids.shape) * self.valid

    @property
    def log_probs(self) -> T:
        return -self.losses

    def mean(self, values: T) -> T:
        """This rank's part of the mean over the targets of all ranks."""
        return (values * self.valid).sum() / self.count


def tokens(side: Side, number: int = 0, model: Any = None) -> Tokens:
    """A forward of the side's model, or of another one on its mesh."""
    own, side.model = side.model, model or side.model
    try:
        logits = full(logits_of(side.forward(number)))
    finally:
        side.model = own
    targets = side.split(side.targets(number))
    return Tokens(logits, targets.clamp(min=0), targets != IGNORED, side.count(number))


def full(value: Any) -> T:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def descend(side: Side, loss: T) -> None:
    """The end of a step: backward, what is logged, clipping, update."""
    loss.backward()
    side.record("loss", side.summed(loss))
    side.clip(0.5)
    side.update()


def frozen(side: Side) -> Any:
    """The first other model on the same mesh, which does not train."""
    model = side.others[0].requires_grad_(False).eval()
    return model if side.alone else side.apply(model).module
