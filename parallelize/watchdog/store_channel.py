"""Messages between the watches of all ranks, through the store of the default process group, on a connection of their
own.

The store answers while training groups are stuck. Every call is short: nothing here waits for another rank.

    hb/RANK        the last heartbeat of a rank
    count, log/I   events, which every rank reads: errors, ranks that left, alarms, questions
    state/RANK     what a rank was doing when the run was ended
    gate/...       collectives that are compared before they are called (`call_gate`)
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.base.torch_private import torch_groups as private_groups

ANSWER_S = 5.0
"""How long the store may take to answer before it counts as lost."""
LOST = (RuntimeError, ValueError)  # what a store raises; DistStoreError is a RuntimeError

_opened = 0


class StoreChannel:
    """One rank's connection.

    Args:
        rank, size: of all processes.
    """

    def __init__(self, rank: int, size: int):
        global _opened
        _opened += 1
        self.rank, self.size = rank, size
        store: Any = private_groups.default_store()
        self._store = dist.PrefixStore(f"parallelize/watch/{_opened}", store.clone())
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._events_read = 0
        self._posting = threading.Lock()
        self._store.add("count", 0)
        self.set(f"hb/{rank}", {})

    def set(self, key: str, value: Any) -> None:
        """Store a value of JSON."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """The value of a key, None where there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def get_all(self, keys: list[str]) -> list[Any] | None:
        """The values of these keys, or None while one of them is missing."""
        if not self._store.check(keys):
            return None
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def first_of(self, key: str, value: str) -> str:
        """The value that the first rank that called this has given."""
        return self._store.compare_set(key, "", value).decode()

    def delete(self, key: str) -> None:
        """Remove a key, if the store can."""
        with suppress(*LOST):
            self._store.delete_key(key)

    def post(self, kind: str, **fields: Any) -> None:
        """Send an event to all ranks."""
        with self._posting:
            index = self._store.add("count", 1)
            self.set(f"log/{index}", {"kind": kind, "rank": self.rank, **fields})

    def read(self, successor: int) -> tuple[list[dict[str, Any]], Any]:
        """(events since the last call, the heartbeat of another rank)."""
        if not self._store.check([f"hb/{successor}"]):
            count, beat = int(self._store.get("count")), None
        else:
            values = self._store.multi_get(["count", f"hb/{successor}"])
            count, beat = int(values[0]), json.loads(values[1])
        return self._new_events(count), beat

    def _new_events(self, count: int) -> list[dict[str, Any]]:
        events = []
        while self._events_read < count:
            event = self.get(f"log/{self._events_read + 1}")
            if event is None:  # counted, and on its way
                break
            self._events_read += 1
            events.append(event)
        return events
