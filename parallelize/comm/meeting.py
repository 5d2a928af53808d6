"""Ranks that compare facts through a store: each posts its own, the first one judges, and all read its verdict."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from parallelize.base.agreement import Facts, differing_rows, problem_from_json, problems_to_json, text_digest
from parallelize.base.errors import HandshakeError, Problem, short_list
from parallelize.comm.uncaught_errors import LATE, wait_for_key, wait_for_keys

_DIGEST_BYTES = 16
_FEW_RANKS = 64
"""Up to so many stand in the keys by their numbers."""
_BLOCK = 256
"""Values that are read at once."""


@dataclass(frozen=True)
class Meeting:
    """Ranks that compare facts, time after time.

    Attributes:
        store: a `torch.distributed.Store` that all of them reach. ranks: their numbers; the first one judges.
        rank: this one. call: what all of them have called.
    """

    store: Any
    ranks: tuple[int, ...]
    rank: int
    call: str

    def compare(self, facts: Facts, timeout_s: float) -> None:
        """Post facts and wait for the verdict.

        Raises: HandshakeError, on every rank.
        Cost: of the first rank, one request for 256 ranks and 16 bytes of each; facts are read only where they differ.
            Another rank posts its facts and waits; the more ranks wait, the less often each asks.
        """
        turn = self.store.add(f"{self._base}/turn/{self.rank}", 1)
        prefix, text = f"{self._base}/{turn}", json.dumps(facts, sort_keys=True)
        self.store.set(f"{prefix}/facts/{self.rank}", zlib.compress(text.encode()))
        self.store.set(f"{prefix}/digest/{self.rank}", text_digest(text, _DIGEST_BYTES).hex())
        if self.rank == self.ranks[0]:
            problems, absent = self._judge(prefix, timeout_s)
            for rank in absent:  # it missed this turn: advance its counter, so that the next one matches again
                own = f"{self._base}/turn/{rank}"
                self.store.add(own, max(0, turn - self.store.add(own, 0)))
            self.store.set(f"{prefix}/verdict", json.dumps(problems_to_json(problems)))
        else:
            problems = self._await_verdict(prefix, timeout_s + 5.0)
        if problems:
            raise HandshakeError(*problems)

    @property
    def _base(self) -> str:
        few = len(self.ranks) < _FEW_RANKS
        return f"parallelize/handshake/{'-'.join(map(str, self.ranks)) if few else hash(self.ranks)}"

    def _judge(self, prefix: str, timeout_s: float) -> tuple[list[Problem], list[int]]:
        """The first rank's verdict: (problems, ranks that posted nothing in time)."""
        absent = wait_for_keys(self.store, {rank: f"{prefix}/digest/{rank}" for rank in self.ranks}, timeout_s)
        if absent:
            return self._problems_of_absent(absent), list(absent)
        digests = _values(self.store, [f"{prefix}/digest/{rank}" for rank in self.ranks])
        first_with = {digest: rank for rank, digest in reversed(list(zip(self.ranks, digests, strict=True)))}
        if len(first_with) == 1:
            return [], []
        facts = {
            digest: json.loads(zlib.decompress(self.store.get(f"{prefix}/facts/{rank}")))
            for digest, rank in first_with.items()
        }
        return _differences({rank: facts[digest] for rank, digest in zip(self.ranks, digests, strict=True)}), []

    def _await_verdict(self, prefix: str, timeout_s: float) -> list[Problem]:
        key = f"{prefix}/verdict"
        if error := wait_for_key(self.store, key, self.ranks[0], timeout_s, waiting=len(self.ranks)):
            if error != LATE:
                return self._problems_of_absent({self.ranks[0]: error})
            try:
                late = [rank for rank in self.ranks if not self.store.check([f"{prefix}/digest/{rank}"])]
            except RuntimeError:  # the store is gone, with the process that has it
                late = []
            return [self._missing(late or list(self.ranks[:1]))]
        return list(map(problem_from_json, json.loads(self.store.get(key))))

    def _problems_of_absent(self, errors: dict[int, str]) -> list[Problem]:
        """A problem for each rank that ended with an error, and one for the ranks that are late."""
        failed = [(rank, error) for rank, error in errors.items() if error != LATE]
        late = [rank for rank, error in errors.items() if error == LATE]
        problems = [
            Problem(
                "rank-failed",
                f"rank {rank} ended before it called {self.call}: {error.splitlines()[0]}",
                rows=(("error", error),) if "\n" in error else (),
                fix=f"correct the error of rank {rank}",
            )
            for rank, error in failed[:4]
        ]
        return [*problems, *([self._missing(late)] if late else [])]

    def _missing(self, ranks: list[int]) -> Problem:
        return Problem(
            "ranks-missing",
            f"ranks {short_list([str(rank) for rank in ranks])} did not call {self.call} in time",
            fix="call it on every rank of the mesh; look at those ranks' own errors",
        )


def _values(store: Any, keys: list[str]) -> list[bytes]:
    if not store.has_extended_api():  # a store of files reads one at a time
        return [store.get(key) for key in keys]
    return [value for first in range(0, len(keys), _BLOCK) for value in store.multi_get(keys[first : first + _BLOCK])]


def _differences(facts: dict[int, Facts]) -> list[Problem]:
    """One problem that names every key on which ranks differ."""
    if len({rank_facts.get("error") for rank_facts in facts.values()}) > 1:  # other differences only follow from it
        facts = {rank: {"error": rank_facts.get("error", "none")} for rank, rank_facts in facts.items()}
    rows = differing_rows(facts)
    if not rows:
        return []
    more = [("and", f"{len(rows) - 20} more keys")] if len(rows) > 20 else []
    return [
        Problem(
            "ranks-disagree",
            f"ranks differ in {len(rows)} of the facts that must be the same",
            rows=tuple(rows[:20] + more),
            fix="start every rank with the same plan, model and settings",
        )
    ]
