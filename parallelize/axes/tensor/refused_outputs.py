"""Refuses outputs that a model records on the way, and that would be shards which look like full tensors."""

from __future__ import annotations

from torch import nn

from parallelize.base.errors import ModelError, Problem


def refuse_hidden_states(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuse `output_hidden_states`: hidden states recorded inside the region are shards that look like full ones."""
    if _requests(module, kwargs, "output_hidden_states"):
        raise ModelError(
            Problem(
                "hidden-states-are-shards",
                "output_hidden_states under sequence parallelism would return sequence shards",
                fix="apply the plan with sequence_parallel=False to look at hidden states",
            )
        )


def refuse_attentions(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuse `output_attentions`: recorded attention weights are those of this rank's heads alone."""
    if _requests(module, kwargs, "output_attentions"):
        raise ModelError(
            Problem(
                "attentions-are-shards",
                "output_attentions would return the weights of this rank's heads alone",
                fix="look at attention weights on a model without a plan",
            )
        )


def _requests(module: nn.Module, kwargs: dict, option: str) -> bool:
    """Whether a call sets this option, or the config does by default."""
    value = kwargs.get(option)
    return bool(getattr(getattr(module, "config", None), option, False) if value is None else value)
