"""ZeRO 3: the ranks of the data axes gather and reduce the same units in the same order.

A rank that skips a unit which the others run would give its shard of another unit to their all-gather: wrong weights
where sizes agree, and a hang or an abort where they do not. So every message is announced here before it is sent.
Nothing is compared as long as each message is the one that came after the same messages the last time: of two ranks
that differ, at least one then does something else. That rank meets the others in the store before it goes on, and says
what it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from parallelize.axes.zero.unit_groups import unit_groups, watch_messages
from parallelize.base.agreement import problem_from_json, problems_to_json
from parallelize.base.errors import HandshakeError, Problem
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

_CONTEXT = 4
"""How many earlier messages predict the next one: modules that run more than once have several
successors."""
_PART_OF_TIMEOUT = 0.8
"""A rank waits in the store for less time than the others in their collective, so that they find its error."""
_FIX = (
    "run the same units on all data ranks: draw what is skipped from a generator that is seeded alike, or use zero=2; "
    "parameters inside of a unit need no gradient on all ranks"
)


class UnitOrder:
    """The messages of a model's units, in the order of this rank.

    Args:
        units: (name, module) of each module to which `fully_shard` was applied.
        group: the ranks along all data axes.

    Cost: a meeting in the store for each message that was not predicted: in the first passes, and where a model runs
        its units in another order than the last time. Nothing else is sent.
    """

    def __init__(self, units: Sequence[tuple[str, Any]], group: Group):
        is_alone = group.size == 1 or "fake" in group.backends.values()
        self._store: Any = None if is_alone else private_groups.default_store()
        self.group, self._runs = group, 0
        self.reset()
        if self._store is None:
            return
        name = f"parallelize/units/{group.pg.group_name}"
        self._prefix = f"{name}/{self._store.add(f'{name}/models/{group.rank}', 1)}"
        self._timeout = _PART_OF_TIMEOUT * _timeout_of(group.pg)
        for unit_name, unit in units:
            for part in unit_groups(unit):
                watch_messages(part, partial(self.sending, unit_name or "what is in no unit"))

    def reset(self) -> None:
        """Forget the order, after a step that failed on all ranks, on each of them elsewhere."""
        self._follows: dict[tuple, str] = {}  # messages and the position in the step -> the message that came then
        self._recent: tuple[str, ...] = ()
        self._count, self._meetings = 0, 0
        self._step_start: int | None = None
        self._runs += 1

    def begin_step(self) -> None:
        """An engine begins several passes, whose order depends on the position in the step."""
        self._step_start = self._count

    def end_step(self) -> None:
        """The passes have ended."""
        self._step_start = None

    @contextmanager
    def sending(self, name: str, kind: str) -> Iterator[None]:
        """Announce a message of a unit, which is sent inside.

        Raises: HandshakeError `units-diverge`, on the ranks that wait for the message too.
        """
        if self._store is None:
            yield
            return
        message = f"{kind} {name}" if private.backward_id() == -1 else f"{kind} {name} in backward"
        context = (*self._recent, None if self._step_start is None else self._count - self._step_start)
        if self._follows.get(context) != message:
            self._meet(message, self._follows.get(context))
            self._follows[context] = message
        self._recent, self._count = (*self._recent, message)[-_CONTEXT:], self._count + 1
        try:
            yield
        except RuntimeError as error:  # the others may have met something else
            self._raise_posted(error)
            raise

    def _meet(self, message: str, usual: str | None) -> None:
        """Compare this rank's next message with that of the others, which meet it if theirs is not the usual one
        either."""
        key = f"{self._prefix}/{self._runs}/{self._meetings}"
        self._meetings += 1
        rank, line = self.group.ranks[self.group.rank], f"{self._count} {message}"
        first_line, _, first_rank = self._store.compare_set(key, "", f"{line}\n{rank}").decode().partition("\n")
        if first_line != line:
            rows = ((f"rank {first_rank}", first_line.partition(" ")[2]), (f"rank {rank}", message))
            self._post(Problem("units-diverge", "data ranks run different units of ZeRO 3", rows=rows, fix=_FIX))
            self._store.set(f"{key}/met", "")
        elif self._store.add(f"{key}/ranks", 1) == self.group.size:
            self._store.set(f"{key}/met", "")
        try:
            self._store.wait([f"{key}/met"], timedelta(seconds=self._timeout))
        except (RuntimeError, dist.DistError):
            self._post(self._left_alone(message, usual))
        self._raise_posted(None)

    def _left_alone(self, message: str, usual: str | None) -> Problem:
        rank = self.group.ranks[self.group.rank]
        what = f"rank {rank} left the order in which the data ranks run units of ZeRO 3, and was not followed"
        rows = [(f"rank {rank}", message)] + ([("before", usual)] if usual is not None else [])
        return Problem("units-diverge", what, rows=tuple(rows), fix=_FIX)

    def _post(self, problem: Problem) -> None:
        text = json.dumps(problems_to_json([problem]))
        self._store.compare_set(f"{self._prefix}/{self._runs}/problem", "", text)

    def _raise_posted(self, cause: Exception | None) -> None:
        key = f"{self._prefix}/{self._runs}/problem"
        try:
            text = self._store.get(key) if self._store.check([key]) else None
        except (RuntimeError, dist.DistError):  # the store has ended with its rank
            return
        if text is not None:
            raise HandshakeError(*map(problem_from_json, json.loads(text))) from cause


def _timeout_of(pg: Any) -> float:
    """The seconds after which a collective of a group fails; a minute if the backend does not say (2.4)."""
    for backend in dict.fromkeys(pg._device_types):
        try:
            return pg._get_backend(backend).options._timeout.total_seconds()
        except (AttributeError, RuntimeError):
            continue
    return 60.0
