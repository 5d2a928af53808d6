"""The loss that a stock model computes from `labels`, over data ranks: a part of the mean over all of them.

Gradients are sums over the data axes, so that a mean over the tokens of one rank would count as many times as there are
ranks. Over `cp` the inputs of context parallelism do the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.applied.records import applied
from parallelize.errors import ModelError, Problem
from parallelize.models.wrapped_models import stock_model
from parallelize.vocabulary.loss.losses import valid_tokens


def count_over_data_ranks(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the loss of a model of `transformers`, in calls that build a graph, be divided by the count of all data ranks."""
    module = stock_model(module)
    parameters = inspect.signature(type(module).forward).parameters
    if "labels" in parameters and hasattr(module, "loss_function"):
        module.register_forward_pre_hook(_Counts(type(module), mesh), with_kwargs=True)


class _Counts:
    """Before a forward: passes `num_items_in_batch`, by which the losses of causal models divide their sum.

    Raises: ModelError `labels-over-data-ranks` for other losses, of which no count is known.
    """

    def __init__(self, model: type[nn.Module], mesh: DeviceMesh):
        self.mesh, self.signature = mesh, inspect.signature(model.forward)
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())

    def __deepcopy__(self, memo: dict) -> _Counts:
        return self

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        counted = kwargs.get("num_items_in_batch") is not None or applied(module).context is not None
        if counted or not torch.is_grad_enabled():
            return None
        labels = self.signature.bind_partial(None, *args, **kwargs).arguments.get("labels")
        if labels is None:
            return None
        if not self.takes_more or getattr(module, "loss_type", None) != "ForCausalLM":
            raise _refused(type(module).__name__)
        shifted = kwargs.get("shift_labels")
        targets = labels[..., 1:] if shifted is None else shifted
        return args, {**kwargs, "num_items_in_batch": valid_tokens(targets, self.mesh)}


def _refused(name: str) -> ModelError:
    what = f"the loss of {name} is a mean over one data rank, of which the gradients would be summed over all"
    fix = "compute the loss from the logits, divided by the count over all data ranks: ParallelModel.step(..., targets=...)"
    return ModelError(Problem("labels-over-data-ranks", what, fix=fix))
