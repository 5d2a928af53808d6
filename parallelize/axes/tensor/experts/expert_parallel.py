"""Whole experts of a mixture on each rank of `ep`, or a part of them over `etp`: the style `experts` with these options.

    tokens [N, hidden], choices [N, k], weights [N, k] of this rank
    sent to the ranks that have their experts, one row for each rank          (ops/experts)
    stock forward of the pairs of a row and one expert of this rank (k = 1)   -> [pairs, hidden], added up by row
    sent back, while shared experts are computed (beside_experts.py)
    added up by token -> the output [N, hidden]

Of experts split over `etp`, a row goes to every rank that has a part of its expert, and the partial results are added up by token
with all others: nothing else is sent for them.

Where all ranks of `tp` have the same tokens, each takes a part of them, and the outputs are gathered.

Source: Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.axes.tensor.experts.expert_forms import ExpertForm
from parallelize.axes.tensor.planned_forward import Conversion
from parallelize.base.torch_private.torch_dynamo import not_traced
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops import replay_cache
from parallelize.ops.experts.call_form import CallForm
from parallelize.ops.experts.routes import Routes, indices_of, routes_of
from parallelize.ops.experts.transfers import Transfers, arrive, collect, dispatch, give_back

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
    """

    fqn: str
    group: Group
    etp: int
    num_experts: int
    num_chunks: int
    same_tokens: Group | None

    @property
    def biases(self) -> dict[str, Conversion]:
        """What the stock forward reads instead of a bias that `etp` splits over the output's width."""
        if self.etp == 1:
            return {}
        part = self.group.rank // (self.group.size // self.etp)
        return {"down_proj_bias": partial(_in_its_place, before=part, after=self.etp - 1 - part)}


def whole_experts(form: ExpertForm, ranks: ExpertRanks) -> Callable:
    """A forward with the arguments and results of the stock one."""
    run = outputs_of_tokens(form, ranks)

    def forward(self: Any, *args: Any, **kwargs: Any) -> T:
        return form.result(self, run(self, *form.inputs(self, args, kwargs)), args, kwargs)

    return forward


def outputs_of_tokens(form: ExpertForm, ranks: ExpertRanks) -> Callable[[Any, T, T, T], T]:
    """A function of the module, tokens [N, hidden], choices [N, k] and weights [N, k] of this rank: their outputs [N, hidden]."""
    same = ranks.same_tokens

    def run(module: Any, *inputs: T) -> T:
        if same is None:
            return _exchanged(module, form, ranks, *inputs)
        out = _exchanged(module, form, ranks, *(ops.split(x, same, 0) for x in inputs))
        return ops.gather(out, same, 0, len(inputs[0]), gradient="replicate")

    return run


@not_traced
def _exchanged(self: Any, form: ExpertForm, ranks: ExpertRanks, tokens: T, choices: T, weights: T) -> T:
    """The output of this rank's tokens. No graph has it: the host reads from other ranks how many rows each message has."""

    def find_routes() -> Routes:
        call = CallForm.of(ranks.fqn, tokens, weights)
        return routes_of(choices, ranks.num_experts, ranks.group, ranks.num_chunks, ranks.fqn, call, ranks.etp)

    # a replay sends the same rows, even where a near tie of the router falls otherwise
    routes = replay_cache.remembered("routes", find_routes)
    transfers = Transfers(routes, ranks.group, tokens, weights)
    biases, returned, ahead = ranks.biases, [], self._applied.planned.ahead
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


def _in_its_place(bias: T, before: int, after: int) -> T:
    """A part of a bias, [experts, hidden / parts], with zeros for the parts before and after it: [experts, hidden]."""
    width = bias.shape[1]
    return F.pad(bias, (before * width, after * width))
