"""Whole experts of Llama 4 over `ep`, whose block calls them with every token once for each expert: `experts(tokens=all)`.

    rows [experts x N, hidden]: token t for expert e is row e N + t, scaled by its score; 0 where the token did not choose e
    rows that are not zero, with their experts as choices -> the ranks of their experts, and back      (whole_experts.py)
    stock forward of received rows, as many for each expert: rows of zeros are added
    zeros for all other rows -> [experts x N, hidden]

Nothing is lost with a row of zeros: down(up(x) * act(gate(x))) and its derivatives are zero at x = 0 where act(0) = 0, as for SiLU.
So a token is sent to the ranks of the experts that it chose, where the stock forward multiplies it by all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.experts.expert_forms import Inputs, StackedExperts, input_names
from parallelize.axes.tensor.experts.expert_parallel import ExpertRanks, outputs_of_tokens
from parallelize.axes.tensor.planned_forward import Conversion, on_local_parameters
from parallelize.base.errors import ModelError, Problem
from parallelize.ops import replay_cache
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.styles.style import ModuleFacts

T = torch.Tensor


def check_scaled_experts(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `wrong-experts-call` for experts with other inputs, or whose result for a row of zeros has a gradient."""
    names, act = input_names(module), getattr(module, "act_fn", None)
    if len(names) == 1 and callable(act) and not act(torch.zeros(1)).any():
        return
    takes = (
        f"takes {', '.join(names) or 'no inputs'}"
        if len(names) != 1
        else "has no activation `act_fn` with act_fn(0) = 0"
    )
    what = f"{fqn}.forward {takes}: not rows [experts x tokens, hidden], of which those of zeros change nothing"
    raise ModelError(Problem("wrong-experts-call", what, fix="ep=1, etp=1: each expert is split over tp"))


def scaled_experts_of(model: ModelFacts) -> Iterator[ModuleFacts]:
    """The modules of experts that are called with every token, scaled: known by their two stacks of weights and their one input."""
    for fqn, facts in model.modules.items():
        if facts.kind == "other" and facts.shapes.keys() == _STACKS and len(input_names(model.objects[fqn])) == 1:
            yield facts


_STACKS = {"gate_up_proj", "down_proj"}


def num_choices(model: ModelFacts, fqn: str) -> int:
    """How many experts a token chooses: an attribute of the block that calls them."""
    return int(getattr(model.objects.get(fqn.rpartition(".")[0]), "top_k", 1))


def scaled_experts(module: nn.Module, ranks: ExpertRanks, choices_per_token: int) -> Callable:
    """A forward with the argument and result of the stock one. choices_per_token: for analysis without values."""
    run = outputs_of_tokens(_AsManyRows(module), ranks)

    def forward(self: Any, rows: T) -> T:
        num_tokens = len(rows) // ranks.num_experts
        # a replay sends the same rows, even where a near tie of the router falls otherwise
        chosen = replay_cache.remembered("chosen rows", lambda: _chosen(rows, num_tokens * choices_per_token))
        choices = (chosen // max(num_tokens, 1))[:, None]
        out = run(self, rows.index_select(0, chosen), choices, rows.new_ones(len(chosen), 1))
        return out.new_zeros(rows.shape).index_copy(0, chosen, out)

    return forward


def _chosen(rows: T, assumed: int) -> T:
    """Indices of the rows that are not zero; NaN is not."""
    if rows.is_meta:
        return torch.arange(assumed, device=rows.device)
    return (rows != 0).any(1).nonzero().flatten()


class _AsManyRows(StackedExperts):
    """Experts that are called with as many rows for each, [experts x rows, hidden]."""

    def compute(self, module: Any, inputs: Inputs, count: int, biases: Mapping[str, Conversion]) -> T:
        tokens, choices, _ = inputs
        places, most = _places(choices.flatten(), count)
        padded = tokens.new_zeros(count * most, tokens.shape[1]).index_copy(0, places, tokens)
        return on_local_parameters(module, module._applied.planned, (padded,), {}, biases).index_select(0, places)


def _places(experts: T, count: int) -> tuple[T, int]:
    """(the place of each row among as many for each expert, that number)."""
    if experts.is_meta:
        return torch.arange(len(experts), device=experts.device), -(-len(experts) // count)
    sizes = experts.bincount(minlength=count)
    most, order = int(sizes.max()), experts.argsort(stable=True)
    before = (sizes.cumsum(0) - sizes)[experts[order]]  # rows of lower experts
    places = torch.empty_like(order)
    places[order] = experts[order] * most + torch.arange(len(order), device=order.device) - before
    return places, most
