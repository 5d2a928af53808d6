"""How tokens without values are routed, for analysis: evenly, or all of them to one rank, the worst that can happen to it."""

from __future__ import annotations

import threading


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
            ep, etp: ranks that divide the experts, and that have a part of each; every one of them gets the rows of an expert.
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
