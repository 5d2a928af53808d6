"""What the exit statuses of ranks say about a run: done, stopped, a mistake, or a failure after which it may go on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.base.terminal.console import ENVIRONMENT, FINE, MISTAKE, REQUEUE

FAILED, PEER_LOST = 1, 4
"""A rank that failed by itself, and one that failed because it lost another."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        status: of the run, if it is not tried again. again: whether another attempt may succeed.
        blamed: the rank that failed first, as far as statuses tell; None where no rank did. what: one line. by: its status.
    """

    status: int
    again: bool
    blamed: int | None
    what: str
    by: int = 0


def judge(statuses: Mapping[int, int]) -> Ended:
    """How an attempt ended, from the exit statuses of ranks that did not end with 0. A negative one is a signal's number."""
    if not statuses:
        return Ended(FINE, False, None, "done")
    for status in (MISTAKE, ENVIRONMENT, REQUEUE):
        ranks = [rank for rank, ended in statuses.items() if ended == status]
        if ranks:
            what = (
                "stopped by a signal, and saved" if status == REQUEUE else f"rank {ranks[0]} ended with status {status}"
            )
            return Ended(status, False, ranks[0], what)
    # SIGTERM is what the launcher sends to the others; a rank that was killed is to blame before one that lost its peer
    killed = [rank for rank, status in sorted(statuses.items()) if status < 0 and status != -15]
    failed = [rank for rank, status in sorted(statuses.items()) if status not in (PEER_LOST, -15)]
    blamed = (killed or failed or sorted(statuses))[0]
    status = statuses[blamed]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Ended(FAILED, True, blamed, f"rank {blamed} {how}", status)
