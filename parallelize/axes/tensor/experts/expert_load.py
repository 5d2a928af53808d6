"""How evenly a training step spreads tokens over experts and their ranks, as numbers to log."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from parallelize.axes.tensor.experts.balanced_routing import experts_of
from parallelize.axes.tensor.experts.routing_load import RoutingLoad, largest_over_stages, routing_load
from parallelize.base.errors import ModelError

EXPERT, RANK = "expert_imbalance", "expert_rank_imbalance"
"""Tags: the largest over the mean number of tokens of an expert, and of a rank of `ep`, in the worst layer of the model."""


class ExpertLoad:
    """Counts of each step of a training loop, if the model is a mixture whose choices can be counted on some stage.

        load = ExpertLoad(model)
        with load.counting():
            loss = parallel.step(ids, labels=labels)
        logger.log({"loss": loss, **load.scalars()}, step)

    Building it is a collective over the pipeline stages.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._load: RoutingLoad | None = None
        (self.is_counted,) = largest_over_stages(model, [float(_has_counted_experts(model))])

    def counting(self) -> AbstractContextManager[Any]:
        """Around the forwards of one step. It costs a sum over the choices of each layer, and no message."""
        if not self.is_counted:
            return nullcontext()
        return _Counting(self)

    def scalars(self) -> dict[str, float]:
        """Of the last step that was counted; {} for models without such experts. A collective, and a wait of the host."""
        if self._load is None:
            return {}
        imbalance = self._load.imbalance()
        return {EXPERT: imbalance["expert"], RANK: imbalance["rank"]}


class _Counting(AbstractContextManager[None]):
    def __init__(self, load: ExpertLoad):
        self.load, self.counting = load, routing_load(load.model)

    def __enter__(self) -> None:
        self.load._load = self.counting.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.counting.__exit__(*error)


def _has_counted_experts(model: nn.Module) -> bool:
    try:
        return bool(experts_of(model))
    except ModelError:  # a dense model, or one whose experts get every token
        return False
