"""Every rank says what it is, through the store, before any process group exists: who is missing is named within the limit.

The first rank compares, and all ranks get the same answer. The store is asked by each rank a few times, whatever the number of ranks
is, and an answer has the names of hosts, not the facts of all ranks, so that it stays short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import groupby
from typing import Any

from parallelize.base.errors import LaunchError, Problem, short_list
from parallelize.checkpoint.run.rank_sync import problem_from_json, problems_to_json, ranks_by_value
from parallelize.launch.preflight.rank_facts import MUST_AGREE, SHOULD_AGREE, values_by_rank

LIMIT_S = 28.0
"""The whole preflight, with what comes after the answer, is to end within 30 s."""
_EVERY_S = 0.05
_READ_S = 3.0
Facts = dict[int, dict[str, str]]


def roll_call(
    store: Any,
    rank: int,
    ranks: int,
    facts: Mapping[str, str],
    *,
    host_of: Callable[[int], str] = lambda rank: "",
    limit_s: float = LIMIT_S,
) -> Facts:
    """The facts of all ranks, once they have been found to agree: on rank 0 all of them, on the others the hosts alone.

    Args:
        store: a store that all ranks see.
        facts: of this rank.
        host_of: the host on which a rank was to start, where the launcher has said so.

    Raises: LaunchError `ranks-missing` with the ranks and hosts that have not answered; `ranks-differ` with the values by rank;
        `device-shared`. The same on every rank; on a rank to which the first one does not answer, `head-silent`.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    store.add("here", 1)
    if rank:
        answer = _answer(store, limit_s)
        found = dict(enumerate({"host": host} for host, count in answer["hosts"] for _ in range(count)))
    else:
        found, problems = _collect(store, ranks, host_of, limit_s)
        fields = problems_to_json(LaunchError(*problems)) if problems else []
        hosts = [fact["host"] for _, fact in sorted(found.items())]
        answer = {"problems": fields, "hosts": [(host, len(list(same))) for host, same in groupby(hosts)]}
        store.set("answer", json.dumps(answer))
        if problems:
            _wait_for_readers(store, len(found) - 1)
    if answer["problems"]:
        raise LaunchError(*(problem_from_json(fields, None) for fields in answer["problems"]))
    return found


def _collect(store: Any, ranks: int, host_of: Callable[[int], str], limit_s: float) -> tuple[Facts, list[Problem]]:
    """The facts of the ranks that answer, and what is wrong."""
    deadline = time.monotonic() + limit_s
    while store.add("here", 0) < ranks and time.monotonic() < deadline:
        time.sleep(_EVERY_S)
    keys = [f"facts/{rank}" for rank in range(ranks)]
    answered = list(range(ranks))
    if not store.check(keys):  # also where two processes have one rank
        answered = [rank for rank in answered if store.check([keys[rank]])]
    texts = store.multi_get([keys[rank] for rank in answered])
    facts = {rank: json.loads(text) for rank, text in zip(answered, texts, strict=True)}
    missing = sorted(set(range(ranks)) - set(facts))
    return facts, [_missing(missing, facts, host_of, limit_s)] if missing else differences(facts)


def _wait_for_readers(store: Any, others: int) -> None:
    """Live until the other ranks have read what is wrong, or for a while: this process may have the store."""
    deadline = time.monotonic() + _READ_S
    while store.add("read", 0) < others and time.monotonic() < deadline:
        time.sleep(_EVERY_S)


def _missing(missing: list[int], facts: Facts, host_of: Callable[[int], str], limit_s: float) -> Problem:
    hosts = sorted({host_of(rank) for rank in missing} - {""})
    where = f" on {short_list(hosts)}" if hosts else ""
    answered = sorted({fact["host"] for fact in facts.values()})
    what = f"ranks {short_list(list(map(str, missing)))}{where} have not answered within {limit_s:.0f} s"
    fix = "look at that host's log: a firewall, a full disk, a missing package, or a process that did not start"
    return Problem("ranks-missing", what, rows=(("answered", short_list(answered)),), fix=fix)


def _answer(store: Any, limit_s: float) -> dict[str, Any]:
    try:
        store.wait(["answer"], timedelta(seconds=limit_s + 5))
        answer = json.loads(store.get("answer"))
        if answer["problems"]:
            store.add("read", 1)
        return answer
    except RuntimeError as error:
        what = f"rank 0 has not answered within {limit_s + 5:.0f} s: {str(error).splitlines()[0][:120]}"
        raise LaunchError(Problem("head-silent", what, fix="look at the head node's log")) from None


def differences(facts: Facts) -> list[Problem]:
    """What ranks must have alike and have not."""
    problems = []
    for name in MUST_AGREE:
        values = values_by_rank(facts, name)
        if len({value for _, value in values}) > 1:
            fix = "install the same versions, and start every rank with the same files"
            problems.append(
                Problem("ranks-differ", f"ranks have different values of {name}", rows=ranks_by_value(values), fix=fix)
            )
    slots: dict[tuple[str, str], list[int]] = {}
    for rank, fact in sorted(facts.items()):
        slots.setdefault((fact["host"], fact["slot"]), []).append(rank)
    for (host, slot), ranks in slots.items():
        if len(ranks) > 1:
            what = f"ranks {short_list(list(map(str, ranks)))} share {slot} of {host}"
            problems.append(
                Problem("device-shared", what, fix="one rank a GPU: fewer ranks on this node, or LOCAL_RANK of each")
            )
    return problems


def remarks(facts: Facts) -> list[str]:
    """What ranks should have alike and have not: lines of text."""
    lines = []
    for name in SHOULD_AGREE:
        values = values_by_rank(facts, name)
        if len({value for _, value in values}) > 1:
            lines.append(f"{name} differs: " + "; ".join(f"{label} {value}" for label, value in ranks_by_value(values)))
    return lines
