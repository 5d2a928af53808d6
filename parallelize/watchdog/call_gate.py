"""Collectives of gloo that are compared before they are called, because gloo aborts the process of a healthy rank
otherwise.

A training loop calls the same collectives over and over. What follows on the last two calls of a group is predicted to
be what followed the last time. All ranks of the group have the same history, so the same prediction. A rank whose call
is the predicted one goes on at once. If any rank's call is another than that of its peers, at least one call is not the
predicted one, and the rank that makes it asks the others, through the store, before it calls: their watches answer,
also where their main thread is already inside gloo. So a difference is always found before gloo sees it, and a call
that repeats costs no message.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from parallelize.base.agreement import named_ranks
from parallelize.base.errors import HandshakeError, Problem
from parallelize.watchdog.call_log import UNEVEN, CallLog, CollectiveCall, GroupCalls
from parallelize.watchdog.store_channel import StoreChannel
from parallelize.watchdog.verdict import call_text

_ASK_S = 0.03
_LONGEST_PAUSE_S = 0.02

COLLECTIVES_DIFFER = "collectives-differ"

Question = dict[str, Any]


class CallGate:
    """Compares calls that are not predicted, and answers the questions of other ranks.

    Attributes:
        waiting: the group and call for which this rank waits for others, or None.
        closed: set where comparing has ended; a rank that waits goes on.
    """

    def __init__(self, channel: StoreChannel, log: CallLog):
        self.channel, self.log = channel, log
        self.waiting: tuple[GroupCalls, CollectiveCall] | None = None
        self.closed = False
        self._posted: dict[str, str] = {}  # group to the key of the last comparison, which every rank has read
        self._questions: list[Question] = []

    def check(self, group: GroupCalls, call: CollectiveCall, tensor: torch.Tensor | None) -> None:
        """Return if every rank of the group makes this call now, which is not the very one that was expected.

        Raises: HandshakeError `collectives-differ`.
        """
        if self.closed or not (tensor is None or tensor.is_cpu):
            return
        compared, expected = call.compared, group.history.expected
        if expected is not None and expected.compared == compared:
            group.history = expected.history
            return
        group.history = group.history.learn((call.op, call.shape, call.dtype), call.place, compared)
        self._compare(group, call)

    def _compare(self, group: GroupCalls, call: CollectiveCall) -> None:
        channel, prefix = self.channel, f"gate/{group.key}/{call.number}"
        own = f"{prefix}/{channel.rank}"
        channel.set(own, call.as_data())
        self.waiting = group, call
        try:
            answers = self._answers(group, prefix, call.number)
        finally:
            self.waiting = None
        if previous := self._posted.get(group.key):  # all ranks are past it
            channel.delete(previous)
        self._posted[group.key] = own
        if answers is not None:
            refuse_different(self.log.axis_of(group), dict(zip(group.ranks, answers, strict=True)))

    def _answers(self, group: GroupCalls, prefix: str, number: int) -> list[Any] | None:
        """The call of every rank of the group; None where the watch ends meanwhile. A rank that never comes is for the
        watch."""
        keys = [f"{prefix}/{rank}" for rank in group.ranks]
        begin, asked, pause = time.monotonic(), False, 0.0001
        while not self.closed:
            answers = self.channel.get_all(keys)
            if answers is not None:
                return answers
            if not asked and time.monotonic() > begin + _ASK_S:
                self.channel.post("question", group=group.key, number=number, ranks=group.ranks)
                asked = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return None

    def ask(self, question: Question) -> None:
        """Remember a question of another rank, to be answered when this rank has made the call."""
        if self.channel.rank in question["ranks"]:
            self._questions.append(question)

    def answer(self, groups: dict[str, GroupCalls]) -> None:
        """Answer the questions about calls that this rank has made."""
        pending = []
        for question in self._questions:
            group = groups.get(question["group"])
            if group is None or group.collectives <= question["number"]:
                pending.append(question)
            elif (call := group.find(question["number"])) is not None:
                key = f"gate/{group.key}/{call.number}/{self.channel.rank}"
                self.channel.set(key, call.as_data())
        self._questions = pending


def refuse_different(axis: str, calls: dict[int, dict[str, Any]]) -> None:
    """Raises: HandshakeError `collectives-differ` with the ranks of each different call."""
    ranks_of: dict[tuple[Any, ...], list[int]] = {}
    for rank, call in calls.items():
        compared = call["op"], tuple(call["shape"]) if _has_shape(call) else (), call["dtype"]
        place = (call["module"], call["phase"]) if call["module"] else ("", "")
        ranks_of.setdefault((*compared, *place), []).append(rank)
    if len(ranks_of) == 1:
        return
    ordered = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))
    rows = tuple((named_ranks(ranks), call_text(calls[ranks[0]])) for ranks in ordered)
    number = next(iter(calls.values()))["number"]
    what = f"ranks differ in collective {number} of {axis}, before it was sent"
    fix = "give each rank of this group batches of the same shape and dtype, and the same branches, steps and calls"
    raise HandshakeError(Problem("collectives-differ", what, rows=rows, fix=fix))


def _has_shape(call: dict[str, Any]) -> bool:
    return call["op"] not in UNEVEN
