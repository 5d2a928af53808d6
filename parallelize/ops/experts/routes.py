"""Which tokens go to which rank: from the choices of a router to rows, by destination.

A token goes once to each rank that has any of its experts, however many of them it has. Tokens are divided into chunks, so that
the rows of one travel while the experts compute those of another. Ranks first tell each other how many rows come, with one
message and one wait of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import balanced_interval, even_interval
from parallelize.comm.groups import Group
from parallelize.ops.experts.assumed_routing import assumed_routing
from parallelize.ops.experts.call_form import FIELDS, CallForm, check_forms

T = torch.Tensor


@dataclass(frozen=True)
class TokenChunk:
    """The rows of one chunk of tokens.

    Attributes:
        rows: [sum(sent)], indices of this rank's tokens, by destination.
        sent, received: numbers of rows by rank of the group.
        pairs: the number of (received row, choice of one of this rank's experts).
    """

    rows: T
    sent: list[int]
    received: list[int]
    pairs: int


@dataclass(frozen=True)
class Routes:
    """Where the tokens of one call go. choices: [tokens, k], of all experts. experts: [start, stop) of this rank's."""

    choices: T
    chunks: tuple[TokenChunk, ...]
    experts: tuple[int, int]


def routes_of(
    choices: T, num_experts: int, group: Group, num_chunks: int, where: str, form: CallForm, etp: int = 1
) -> Routes:
    """The routes of this rank's tokens, and what it receives. A collective.

    Args:
        choices: [tokens, k] of this rank, experts of [0, num_experts).
        num_chunks: the same on every rank.
        where: the name of the experts, for messages.
        form: of this call on this rank.
        etp: ranks that have a part of each expert. All of them get its tokens, and their results are added up by token.

    Raises: on every rank of the group, ModelError `experts-differ` where their forms differ, `bad-choice` where one of them has
        choices outside of [0, num_experts).
    """
    ep = group.size // etp  # changes fastest with the rank
    experts = balanced_interval(num_experts, ep, group.rank % ep)
    intervals = [even_interval(len(choices), num_chunks, n) for n in range(num_chunks)]
    if choices.is_meta:
        sizes = [2 * num_chunks + 1 + FIELDS] * group.size
        group.all_to_all(choices.new_empty(sum(sizes), dtype=torch.int64), sizes, sizes)
        num_local = experts[1] - experts[0]
        chunks = [_assumed_chunk(choices[a:b], a, num_local, (ep, etp)) for a, b in intervals]
        return Routes(choices, tuple(chunks), experts)
    wrong = (choices < 0) | (choices >= num_experts)
    owners = _owners(choices, num_experts, ep)
    counts = torch.zeros(len(choices), ep, dtype=torch.int64, device=choices.device)
    counts.scatter_add_(1, owners, torch.ones_like(owners))
    counts = counts.repeat(1, etp)  # choices by destination
    goes = counts > 0
    sums = [part for a, b in intervals for part in (goes[a:b].sum(0), counts[a:b].sum(0))]
    sent = torch.stack([*sums, wrong.sum().expand(group.size)], 1)  # [ranks, 2 per chunk, and wrong choices]
    sent = torch.cat([sent, form.tensor(choices.device).expand(group.size, FIELDS)], 1)
    width = sent.shape[1]
    received = group.all_to_all(sent.view(-1), [width] * group.size, [width] * group.size).view_as(sent)
    here, there = torch.stack([sent, received]).tolist()
    check_forms(form, [CallForm(*row[-FIELDS:]) for row in there], group, where)
    if any(num_wrong := [row[2 * num_chunks] for row in there]):
        raise _bad_choice(num_wrong, _examples(choices[wrong], group), num_experts, group, where)
    chunks = []
    for n, (start, stop) in enumerate(intervals):
        rows_sent, rows_received = [row[2 * n] for row in here], [row[2 * n] for row in there]
        rows = indices_of(goes[start:stop].T, sum(rows_sent))[1] + start
        chunks.append(TokenChunk(rows, rows_sent, rows_received, sum(row[2 * n + 1] for row in there)))
    return Routes(choices, tuple(chunks), experts)


def _owners(choices: T, num_experts: int, num_ranks: int) -> T:
    """The rank of each expert, of ranks with balanced numbers of them."""
    return (((choices + 1) * num_ranks - 1) // num_experts).clamp(0, num_ranks - 1)


def indices_of(mask: T, count: int) -> tuple[T, T]:
    """(rows, columns) of the True elements of a matrix, in row-major order, of which there are `count`. The host does not wait."""
    found = torch.nonzero_static(mask, size=count)
    return found[:, 0], found[:, 1]


def _assumed_chunk(choices: T, start: int, num_local: int, ranks: tuple[int, int]) -> TokenChunk:
    """Of tokens without values, from `start` on. num_local: of the experts of this rank. ranks: ep and etp."""
    tokens, k = choices.shape
    sent, received, pairs = assumed_routing().sizes(tokens, k, num_local, *ranks)
    rows = torch.arange(sum(sent), device=choices.device) % max(tokens, 1) + start
    return TokenChunk(rows, sent, received, pairs)


def _examples(wrong: T, group: Group) -> list[int]:
    """One wrong choice of each rank that has any. A collective."""
    return group.all_gather(torch.cat([wrong.long(), wrong.new_zeros(1).long()])[:1]).flatten().tolist()


def _bad_choice(counts: list[int], examples: list[int], num_experts: int, group: Group, where: str) -> ModelError:
    ranks = zip(group.ranks, counts, examples, strict=True)
    rows = tuple((f"rank {rank}", f"{count} choices, such as {choice}") for rank, count, choice in ranks if count)
    what = f"{where} got choices outside of [0, {num_experts})"
    return ModelError(
        Problem("bad-choice", what, rows=rows[:16], fix="check the router: its weights, and NaN in its logits")
    )
