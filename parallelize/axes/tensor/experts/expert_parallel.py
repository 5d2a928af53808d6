"""Whole experts of a mixture on each rank of `ep`, or a part of them over `etp`: the style `experts` with these
options.

    tokens [N, hidden], choices [N, k], weights [N, k] of this rank
    sent to the ranks that have their experts, one row for each rank          (ops/experts)
    stock forward of the pairs of a row and one expert of this rank (k = 1)   -> [pairs, hidden], added up by row
    sent back, while shared experts are computed (beside_experts.py)
    added up by token -> the output [N, hidden]

Of experts split over `etp`, a row goes to every rank that has a part of its expert, and the partial results are added
up by token with all others: nothing else is sent for them.

Where all ranks of `tp` have the same tokens, each takes a part of them, and the outputs are gathered.

Source: Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.experts.expert_forms import ExpertForm, Inputs, StackedExperts, input_names
from parallelize.axes.tensor.planned_forward import Conversion, on_local_parameters
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private.torch_dynamo import not_traced
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops import replay_cache
from parallelize.ops.experts.routes import CallForm, Routes, indices_of, renumbered, routes_of
from parallelize.ops.experts.transfers import Transfers, arrive, collect, dispatch, give_back
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.styles.style import ModuleFacts

T = torch.Tensor


@dataclass(frozen=True)
class ExpertRanks:
    """Over which ranks experts are divided, and what their ranks send.

    Attributes:
        fqn: the name of the experts.
        group: the ranks that have all experts together: of `etp` and `ep`, which changes fastest.
        etp: the ranks that have a part of each expert.
        num_experts: on all ranks together.
        num_chunks: parts of the tokens, of which one travels while another is computed.
        same_tokens: the ranks of `tp` where they have the same tokens; None where each rank has its own.
        order: of the experts over the ranks of `ep`; None: that of the model.
    """

    fqn: str
    group: Group
    etp: int
    num_experts: int
    num_chunks: int
    same_tokens: Group | None
    order: tuple[int, ...] | None = None

    @property
    def biases(self) -> dict[str, Conversion]:
        """What the stock forward reads instead of a bias that `etp` splits over the output's width."""
        if self.etp == 1:
            return {}
        part = self.group.rank // (self.group.size // self.etp)
        return {"down_proj_bias": partial(_pad_bias_part, before=part, after=self.etp - 1 - part)}


def whole_experts(form: ExpertForm, ranks: ExpertRanks) -> Callable:
    """A forward with the arguments and results of the stock one."""
    run = outputs_of_tokens(form, ranks)

    def forward(self: Any, *args: Any, **kwargs: Any) -> T:
        return form.result(self, run(self, *form.inputs(self, args, kwargs)), args, kwargs)

    return forward


def outputs_of_tokens(form: ExpertForm, ranks: ExpertRanks) -> Callable[[Any, T, T, T], T]:
    """A function of the module, tokens [N, hidden], choices [N, k] and weights [N, k] of this rank: their outputs [N,
    hidden]."""
    same = ranks.same_tokens

    def run(module: Any, *inputs: T) -> T:
        if same is None:
            return _exchanged(module, form, ranks, *inputs)
        out = _exchanged(module, form, ranks, *(ops.split(x, same, 0) for x in inputs))
        return ops.gather(out, same, 0, len(inputs[0]), gradient="replicate")

    return run


@not_traced
def _exchanged(self: Any, form: ExpertForm, ranks: ExpertRanks, tokens: T, choices: T, weights: T) -> T:
    """The output of this rank's tokens. No graph has it: the host reads from other ranks how many rows each message
    has."""

    def find_routes() -> Routes:
        call = CallForm.of(ranks.fqn, tokens, weights)
        return routes_of(choices, ranks.num_experts, ranks.group, ranks.num_chunks, ranks.fqn, call, ranks.etp)

    if ranks.order is not None:
        choices = renumbered(choices, ranks.order, ranks.group.size // ranks.etp)

    # a replay sends the same rows, even where a near tie of the router falls otherwise
    routes = replay_cache.remembered("routes", find_routes)
    transfers = Transfers(routes, ranks.group, tokens, weights)
    biases, returned, ahead = ranks.biases, [], self._applied.planned.prefetched
    first, stop = routes.experts

    def compute(rows: T, experts: T, pair_weights: T) -> T:
        return form.compute(self, (rows, experts, pair_weights), stop - first, biases)

    for n, ticket in enumerate(dispatch(tokens, weights, transfers)):
        results = _computed(compute, routes, n, *arrive(ticket, transfers, n))
        returned.append(give_back(results, transfers, n))
    if ahead is not None:
        ahead.compute()
    return collect(tuple(returned), transfers)


def _computed(compute: Callable[..., T], routes: Routes, n: int, tokens: T, weights: T, choices: T) -> T:
    """The results of received rows: the sum over their choices of this rank's experts. [rows, hidden]."""
    first, stop = routes.experts
    num_pairs = routes.chunks[n].pairs
    if not num_pairs:  # one pair that counts nothing, so that parameters, rows and weights get gradients of zeros
        none = tokens.sum(0, keepdim=True)  # zeros that have a gradient, by which units of ZeRO 3 know their backward
        out = compute(none, choices.new_zeros(1, 1).long(), weights.new_zeros(1, 1))
        return tokens + (out.sum() + weights.sum()) * 0
    rows, slots, experts = _pairs(choices, first, stop, num_pairs)
    out = compute(tokens.index_select(0, rows), experts[:, None], weights[rows, slots][:, None])
    # in the dtype of tokens on every rank, also under autocast, where a rank without pairs has no other
    return tokens.new_zeros(tokens.shape).index_add(0, rows, out.to(tokens.dtype))


def _pairs(choices: T, first: int, stop: int, count: int) -> tuple[T, T, T]:
    """(row, slot, local expert) of each choice of the experts [first, stop)."""
    if choices.is_meta:
        pairs = torch.arange(count, device=choices.device)
        return pairs % len(choices), pairs % choices.shape[1], pairs % (stop - first)
    rows, slots = indices_of((choices >= first) & (choices < stop), count)
    return rows, slots, choices[rows, slots].long() - first


def _pad_bias_part(bias: T, before: int, after: int) -> T:
    """A part of a bias, [experts, hidden / parts], with zeros for the parts before and after it: [experts, hidden]."""
    width = bias.shape[1]
    return F.pad(bias, (before * width, after * width))


# -- scaled experts --------------------------------------------------------------------------------------------------
# Whole experts of Llama 4 over `ep`, whose block calls them with every token once for each expert:
# `experts(tokens=all)`. rows [experts x N, hidden]: token t for expert e is row e N + t, scaled by its score; 0 where
# the token did not choose e rows that are not zero, with their experts as choices -> the ranks of their experts, and
# back (whole_experts.py) stock forward of received rows, as many for each expert: rows of zeros are added zeros for
# all other rows -> [experts x N, hidden] Nothing is lost with a row of zeros: down(up(x) * act(gate(x))) and its
# derivatives are zero at x = 0 where act(0) = 0, as for SiLU. So a token is sent to the ranks of the experts that it
# chose, where the stock forward multiplies it by all experts.


def check_scaled_experts(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `wrong-experts-call` for experts with other inputs, or whose result for a row of zeros has a
    gradient."""
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
    """The modules of experts that are called with every token, scaled: known by their two stacks of weights and their
    one input."""
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
