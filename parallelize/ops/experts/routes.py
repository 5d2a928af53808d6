"""Which tokens go to which rank: from the choices of a router to rows, by destination.

A token goes once to each rank that has any of its experts, however many of them it has. Tokens are divided into chunks,
so that the rows of one travel while the experts compute those of another. Ranks first tell each other how many rows
come, with one message and one wait of the host.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from parallelize.base.agreement import text_digest
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import balanced_interval, even_interval
from parallelize.comm.groups import Group
from parallelize.plan.expert_order import new_numbers

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

    Raises: on every rank of the group, ModelError `experts-differ` where their forms differ, `bad-choice` where one of
        them has choices outside of [0, num_experts).
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
    expert_ranks = _expert_ranks(choices, num_experts, ep)
    counts = torch.zeros(len(choices), ep, dtype=torch.int64, device=choices.device)
    counts.scatter_add_(1, expert_ranks, torch.ones_like(expert_ranks))
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


def renumbered(choices: T, order: tuple[int, ...], ep: int) -> T:
    """Choices by the numbers that experts have in the order of the ranks that store them; impossible ones as they are.

    Args:
        choices: [tokens, k], of experts by the model's numbers.
        order: of the experts over the ranks of `ep`: see `plan/expert_order.py`.
    """
    numbers = _tensor(new_numbers(order, ep), choices.device).to(choices.dtype)
    is_possible = (choices >= 0) & (choices < len(order))
    return torch.where(is_possible, numbers[choices.clamp(0, len(order) - 1).long()], choices)


def _expert_ranks(choices: T, num_experts: int, num_ranks: int) -> T:
    """The rank of each expert, of ranks with balanced numbers of them."""
    return (((choices + 1) * num_ranks - 1) // num_experts).clamp(0, num_ranks - 1)


def indices_of(mask: T, count: int) -> tuple[T, T]:
    """(rows, columns) of the True elements of a matrix, in row-major order, of which there are `count`. The host does
    not wait."""
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


# -- call form -------------------------------------------------------------------------------------------------------
# What ranks must have alike in one call of experts: it tells how many bytes a row has, and which messages backward
# sends. Each rank sends it along with its counts of rows, before any row. So ranks that differ all get an error,
# where their messages would not fit together and some would wait for ever.


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CallForm(NamedTuple):
    """Of one rank, in integers.

    Attributes:
        name: digest of the name of the experts.
        choices, hidden: of a token.
        dtype, weights_dtype: indices in `DTYPES`; -1 for another.
        has_backward: whether tokens or weights require a gradient.
    """

    name: int
    choices: int
    hidden: int
    dtype: int
    weights_dtype: int
    has_backward: int

    @classmethod
    def of(cls, where: str, tokens: T, weights: T) -> CallForm:
        """where: the name of the experts. tokens: [tokens, hidden]. weights: [tokens, k]."""
        has_backward = torch.is_grad_enabled() and (tokens.requires_grad or weights.requires_grad)
        dtypes = _index_of(tokens.dtype), _index_of(weights.dtype)
        return cls(_digest(where), weights.shape[1], tokens.shape[1], *dtypes, int(has_backward))

    def tensor(self, device: torch.device) -> T:
        """[fields], int64."""
        return _tensor(self, device)

    def text(self, other: CallForm) -> str:
        """What another rank calls, in words."""
        if other.name != self.name:
            return "other experts"
        gradients = "with" if other.has_backward else "without"
        dtypes = f"{_name_of(other.dtype)} tokens and {_name_of(other.weights_dtype)} weights"
        return f"{other.choices} choices of a token of width {other.hidden}, {dtypes}, {gradients} gradients"


FIELDS = len(CallForm._fields)


def check_forms(form: CallForm, forms: list[CallForm], group: Group, where: str) -> None:
    """forms: by rank of the group. Raises: ModelError `experts-differ`, on every rank of the group."""
    if all(other == form for other in forms):
        return
    rows = tuple((f"rank {rank}", form.text(other)) for rank, other in zip(group.ranks, forms, strict=True))
    what = f"{where} is called in one way on some ranks and in another on others"
    fix = "run the same layers on every rank of ep, in the same mode, with routers that give as many choices"
    raise ModelError(Problem("experts-differ", what, rows=rows[:16], fix=fix))


def _index_of(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else -1


def _name_of(index: int) -> str:
    return str(DTYPES[index]).removeprefix("torch.") if index >= 0 else "other"


@lru_cache(maxsize=4096)
def _digest(text: str) -> int:
    return int.from_bytes(text_digest(text, 7), "big")


@lru_cache(maxsize=4096)
def _tensor(form: tuple[int, ...], device: torch.device) -> T:
    return torch.tensor(form, dtype=torch.int64, device=device)


# -- assumed routing -------------------------------------------------------------------------------------------------
# How tokens without values are routed, for analysis: evenly, or all of them to one rank, the worst that can happen to
# it.


class AssumedRouting:
    """A context manager: within it, in this thread, routers of models on meta choose like this.

    Args:
        to_one_rank: this rank gets all tokens of its group; otherwise each rank gets as many as any other.

    Attributes:
        most_rows, most_choices: that a call has received and computed.
    """

    def __init__(self, to_one_rank: bool = False):
        self.to_one_rank = to_one_rank
        self.most_rows = self.most_choices = 0
        self._outer: AssumedRouting | None = None

    def __enter__(self) -> AssumedRouting:
        self._outer, _current.routing = _current.routing, self
        return self

    def __exit__(self, *error: object) -> None:
        _current.routing, self._outer = self._outer, None

    def sizes(self, tokens: int, k: int, num_local: int, ep: int, etp: int = 1) -> tuple[list[int], list[int], int]:
        """(rows sent by rank, rows received by rank, pairs of a received row and an expert of this rank).

        Args:
            tokens: of each rank of the group. num_local: the number of experts of this rank, the first of the group.
            ep, etp: ranks that divide the experts, and that have a part of each; every one of them gets the rows of an
                expert.
        """
        if self.to_one_rank:  # what a token chooses beyond the experts of this rank is spread over the others
            chosen, others = min(k, num_local), ep - 1
            sent = [tokens, *[-(-tokens * min(k - chosen, others) // max(others, 1))] * others]
            received, pairs = [tokens] * ep, tokens * chosen * ep
        else:  # a token goes to as many ranks as it can
            sent = [-(-tokens * min(k, ep) // ep)] * ep
            received, pairs = sent, tokens * k
        sent, received, pairs = sent * etp, received * etp, pairs * etp
        self.most_rows, self.most_choices = max(self.most_rows, sum(received)), max(self.most_choices, pairs)
        return sent, received, pairs


class _CurrentRouting(threading.local):
    routing: AssumedRouting | None = None


_current = _CurrentRouting()


def assumed_routing() -> AssumedRouting:
    """That of the innermost context of this thread; even without one."""
    return _current.routing or AssumedRouting()
