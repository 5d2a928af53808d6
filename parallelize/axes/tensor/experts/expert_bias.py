"""Experts balanced without a loss: after each step, the bias by which a router chooses moves towards equal numbers of
tokens.

    bias_i += rate * sign(mean(counts) - counts_i)

The bias is added to the scores for the choice alone, so that it has no gradient. Counts are those of all tokens of the
step, over all data ranks, microbatches and sequence shards, without padding: integers, so that every rank adds the same
bits.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallelize.axes.tensor.experts.routing_load import RoutingLoad, choices_of, experts_of, routing_load_of
from parallelize.base.errors import ModelError, Problem
from parallelize.ops.replay_cache import in_recompute, replay_key
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.forward_rows import ForwardRows, call_arguments, forward_rows

T = torch.Tensor
NAMES = ("correction_bias", "expert_bias")
"""How the names of such biases end in `transformers`."""


class ExpertBalance:
    """The biases of a model's routers, and the tokens that each expert got since the last update.

    Args:
        model: the mixture.
        rate: by which a bias moves in an update.

    Attributes:
        biases: name of each module of experts -> the bias of its router.
        load: the counts of this rank.
    """

    def __init__(self, model: nn.Module, rate: float):
        self.rate, self.biases = rate, biases_of(model)
        self.load: RoutingLoad = routing_load_of(model)
        self._rows: ForwardRows | None = None
        self._mask: T | None = None
        self._clear()
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, module, _ in experts_of(model):
            if name in self.biases:
                module.register_forward_pre_hook(partial(self._count, name), with_kwargs=True)

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases, once a step. A collective over the data and tensor ranks of each pipeline stage: one
        all-reduce."""
        counts = self.load.counts()
        for name, bias in self.biases.items():
            numbers = counts[name]
            # exact: integers, and their sum against a multiple of one
            step = self.rate * torch.sign(numbers.sum() - numbers * len(numbers)).to(bias.dtype).view(bias.shape)
            if isinstance(bias, DTensor):
                step = distribute_tensor(step, bias.device_mesh, bias.placements, src_data_rank=None)
            bias.add_(step)
        self._clear()

    def _clear(self) -> None:
        # zeros for layers that are not called, so that ranks send equal messages
        self.load.local = {
            name: torch.zeros(bias.numel(), dtype=torch.int64, device=bias.device) for name, bias in self.biases.items()
        }

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = call_arguments(module, args, kwargs)
        mask = arguments.get("attention_mask")
        self._rows = forward_rows(module, arguments)
        self._mask = mask if mask is not None and mask.shape == (self._rows.batch, self._rows.length) else None

    def _count(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        trains = torch.is_grad_enabled() or replay_key() is not None
        if not (module.training and trains) or in_recompute():
            return
        choices = choices_of(module, args, kwargs)
        self.load.add(name, self.biases[name].numel(), choices, self._weights(len(choices), choices.device))

    def _weights(self, count: int, device: torch.device) -> T:
        """[count]: 0 for rows of padding, else 1."""
        assert self._rows is not None, "the model is called, not a part of it"
        rows = self._rows.indices(count, device)
        mask = torch.ones_like(rows) if self._mask is None else (self._mask.reshape(-1).to(device)[rows] != 0)
        return (mask * (rows >= 0)).to(torch.int64)


def balance_experts(
    model: AnyModel, optimizer: torch.optim.Optimizer | None = None, rate: float = 0.001
) -> ExpertBalance:
    """Balance the experts of a model whose routers have a bias for the choice, such as DeepSeek V3; nothing else ever
    moves it.

    The bias is a part of the model, and so of its checkpoints.

    Args:
        model: a mixture, after `parallelize_module` or `parallelize_model`; for the latter the model itself, not what
            it returns.
        optimizer: each of its steps then ends with an `update`. None: call `update` once a step.
        rate: by which a bias moves in an update.

    Returns: an `ExpertBalance`.
    Raises: ModelError `no-experts`, `no-expert-bias`.
    Cost: one all-reduce of [experts x layers] counts a step.
    """
    model = module_of(model)
    balance = ExpertBalance(model, rate)
    if optimizer is not None:
        optimizer.register_step_post_hook(lambda *_: balance.update())
    return balance


def biases_of(model: nn.Module) -> dict[str, T]:
    """Name of each module of experts on this rank -> the bias of its router.

    Raises: ModelError `no-experts`, `no-expert-bias`.
    """
    by_experts: dict[str, T] = {}
    experts = experts_of(model)
    for name, _, count in experts:
        block = model.get_submodule(name.rpartition(".")[0])
        tensors = {**dict(block.named_buffers()), **dict(block.named_parameters())}
        biases = [x for key, x in tensors.items() if key.endswith(NAMES) and x.numel() == count]
        if len(biases) == 1:
            by_experts[name] = biases[0]
    if not by_experts and experts:
        what = f"no router of {type(model).__name__} has a bias for the choice of experts ({', '.join(NAMES)})"
        fix = "output_router_logits=True, which adds a loss that balances"
        raise ModelError(Problem("no-expert-bias", what, fix=fix))
    return by_experts
