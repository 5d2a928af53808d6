"""What a model of `transformers` records on the way to its output: hidden states of each layer, attention weights.

A rank records its own part. Hidden states of a sequence-parallel region are gathered, those of a pipeline stage are
refused; attention weights of some heads are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.region import Region, hidden_states_are_shards
from parallelize.base.errors import ModelError, Problem

_HIDDEN = "hidden_states"
_SHARDS = "would return sequence shards"


class RecordedHiddenStates:
    """Gathers hidden states of `output_hidden_states`, which layers recorded inside the sequence-parallel region.

    Args:
        region: of the model.
    """

    def __init__(self, region: Region):
        self.region = region
        self.is_gathered = False

    def install(self, name: str, modules: Mapping[str, nn.Module]) -> None:
        """Look at the outputs of the modules around the first layer of a region. name: of that layer."""
        while name:
            name = name.rpartition(".")[0]
            if name in modules and self.gather not in modules[name]._forward_hooks.values():
                modules[name].register_forward_hook(self.gather, with_kwargs=True)
        root = modules[""]
        if self.check not in root._forward_hooks.values():  # of an earlier region
            root.register_forward_hook(self.check, with_kwargs=True)

    def gather(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Gathers recorded hidden states."""
        recorded = output.get(_HIDDEN) if isinstance(output, Mapping) else None
        if not isinstance(recorded, tuple) or type(self.region) is not Region:
            return None
        self.is_gathered = True
        full = tuple(self.region.gather_recorded(x) if isinstance(x, torch.Tensor) else x for x in recorded)
        return type(output)(**{**output, _HIDDEN: full})

    def check(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Refuses hidden states that no output inside of the model has named.

        Raises: ModelError `hidden-states-are-shards`.
        """
        is_gathered, self.is_gathered = self.is_gathered, False
        if not is_gathered and _requests(module, kwargs, "output_hidden_states"):
            raise hidden_states_are_shards(_SHARDS)


def refuse_hidden_states(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuses `output_hidden_states`: hidden states of this stage are shards that look like full ones."""
    if _requests(module, kwargs, "output_hidden_states"):
        raise hidden_states_are_shards(_SHARDS)


def refuse_attentions(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuses `output_attentions`: recorded attention weights are those of this rank's heads alone."""
    if _requests(module, kwargs, "output_attentions"):
        raise ModelError(
            Problem(
                "attentions-are-shards",
                "output_attentions would return the weights of this rank's heads alone",
                fix="look at attention weights on a model without a plan",
            )
        )


def _requests(module: nn.Module, kwargs: dict, option: str) -> bool:
    """Whether a call sets this option, or the config does by default; a list of layers, as of 5.23, sets it too."""
    value = kwargs.get(option)
    value = getattr(getattr(module, "config", None), option, False) if value is None else value
    return isinstance(value, list) or (value is not False and value is not None)
