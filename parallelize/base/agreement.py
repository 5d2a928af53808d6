"""What ranks say to each other when they must agree, whatever carries it: the store, the message of a step, a line
before an operation, files.

Facts are texts by name. A thing that is too long to send is sent as its digest. What differs is named in rows, with the
ranks that have each value. Problems that one rank finds reach the others as plain data.

Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallelize.base.errors import Problem, short_list

Facts = dict[str, str]


def text_digest(text: str, size: int = 8) -> bytes:
    """The digest of a text, the same in every process and version. size: in bytes."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


# -- naming a difference -----------------------------------------------------------------------------------------------


def named_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`; of more than eight the first ones and how many more there are."""
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {short_list(names, 8)}"


def ranks_by_value(values: Sequence[tuple[int, str]]) -> tuple[tuple[str, str], ...]:
    """Rows for a `Problem` from (rank, value): each value once, after the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values:
        ranks_of.setdefault(value, []).append(rank)
    return tuple((named_ranks(sorted(ranks)), value) for value, ranks in ranks_of.items())


def differing_rows(facts: Mapping[int, Facts]) -> list[tuple[str, str]]:
    """Every key on which ranks differ, with the values and their ranks. facts: of each rank."""
    rows = []
    for key in sorted({key for rank_facts in facts.values() for key in rank_facts}):
        ranks_of: dict[str, list[str]] = {}
        for rank, rank_facts in facts.items():
            ranks_of.setdefault(rank_facts.get(key, "absent"), []).append(str(rank))
        if len(ranks_of) > 1:
            values = (f"ranks {short_list(ranks, 6)}: {value[:80]}" for value, ranks in ranks_of.items())
            rows.append((key, "; ".join(values)))
    return rows


# -- problems as plain data --------------------------------------------------------------------------------------------


def problems_to_json(problems: Iterable[Problem]) -> list[Any]:
    """Problems as they are sent."""
    return [[p.slug, p.what, p.where, [list(row) for row in p.rows], p.fix] for p in problems]


def problem_from_json(fields: list[Any], rank: int | None = None) -> Problem:
    """A problem that was sent. rank: the rank that has it. None: several ranks, which the problem's rows name."""
    slug, what, where, rows, fix = fields
    on_rank = () if rank is None else (("on", f"rank {rank}"),)
    return Problem(slug, what, where, (*on_rank, *((str(label), str(text)) for label, text in rows)), fix)
