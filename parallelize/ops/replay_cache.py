"""The replay cache: what a recomputed forward gets from the first one, such as results of collectives.

A recomputed unit runs its forward twice: in the forward pass, and again in backward (a *replay*), to make the tensors
that backward needs. A `ReplayCache` belongs to one forward and its replays; a `RecomputePass` is one run of it. During
a pass, in this thread,

    run_collective(kind, collective, ...) communicates, or in a replay returns the saved result, if the unit saves the
    kind
    remembered(name, make)                  makes a value, or in a replay returns the value of the forward
    is_remembered(name)                     whether a replay has such a value
    in_recompute()                          whether this is a replay
    pass_number()                           distinguishes passes
    at_exit(call)                           calls a function when the pass ends
    replay_key()                            an object that identifies the forward and its replays

Results are matched by kind and by order within a kind. Outside a pass each of these costs one read of a thread-local.

Source: Chen et al., arXiv:1604.06174 (recompute); Korthikanti et al., arXiv:2205.05198 (what is worth saving).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem

ResultKey = tuple[str, int]
"""(kind, number of results of that kind before this one in the same pass)"""


class _Current(threading.local):
    run: RecomputePass | None = None


_CURRENT = _Current()
_NUMBERS = itertools.count(1)


class ReplayCache:
    """What one forward of a recomputed unit saves for its replays. It lives as long as the graph of that forward.

    Args:
        kinds: the kinds of collectives whose results are saved.
        copies: keys of results that the model writes to in place, so that a copy must be saved; learned from earlier
            forwards of the unit, which share the set.
        overwrites: whether a collective may work in place on its input.
    """

    __slots__ = ("__weakref__", "copies", "kinds", "num_bytes", "overwrites", "results", "values")

    def __init__(
        self, kinds: frozenset[str] = frozenset(), copies: set[ResultKey] | None = None, overwrites: bool = True
    ):
        self.kinds, self.overwrites = kinds, overwrites
        self.copies: set[ResultKey] = set() if copies is None else copies
        self.results: dict[ResultKey, _SavedResult] = {}
        self.values: dict[ResultKey, Any] = {}
        self.num_bytes = 0

    def save(self, key: ResultKey, out: Any) -> None:
        saved = self.results[key] = _SavedResult(out, key in self.copies)
        self.num_bytes += sum(tensor.nbytes for tensor in saved.tensors)


class _SavedResult:
    """The result of one collective: a tensor, or a list of tensors."""

    __slots__ = ("copied", "is_list", "tensors", "versions")

    def __init__(self, out: Any, copied: bool):
        self.is_list, self.copied = isinstance(out, (list, tuple)), copied
        outs = out if self.is_list else [out]
        # detached, because the result itself is about to become part of a graph
        self.tensors = [tensor.detach().clone() if copied else tensor.detach() for tensor in outs]
        self.versions = [tensor._version for tensor in self.tensors]

    def was_written(self) -> bool:
        """Whether the model has written to the result since it was received."""
        return any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True))

    def restore(self) -> Any:
        outs = [tensor.clone() if self.copied else tensor.detach() for tensor in self.tensors]
        return outs if self.is_list else outs[0]


class RecomputePass:
    """A context manager: what runs inside is the forward of `cache`, or a replay of it. A replay may be entered
    repeatedly."""

    __slots__ = ("_at_exit", "_counts", "_outer", "cache", "number", "replay")

    def __init__(self, cache: ReplayCache, replay: bool):
        self.cache, self.replay, self.number = cache, replay, 0
        self._counts: dict[str, int] = {}
        self._at_exit: list[Callable[[], None]] = []
        self._outer: RecomputePass | None = None

    def __enter__(self) -> RecomputePass:
        self._counts = {}
        self.number = next(_NUMBERS)
        self._outer, _CURRENT.run = _CURRENT.run, self
        return self

    def __exit__(self, *error: Any) -> None:
        _CURRENT.run, self._outer = self._outer, None
        while self._at_exit:
            self._at_exit.pop()()

    def at_exit(self, call: Callable[[], None]) -> None:
        self._at_exit.append(call)

    def next_key(self, kind: str) -> ResultKey:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return kind, number

    def has_next(self, name: str) -> bool:
        """Whether the forward has made the value that `remembered` would return now."""
        return (name, self._counts.get(name, 0)) in self.cache.values

    def run_collective(self, kind: str, collective: Callable[..., Any], args: tuple) -> Any:
        key, cache = self.next_key(kind), self.cache
        if not self.replay:
            out = collective(*args)
            cache.save(key, out)
            return out
        saved = cache.results.get(key)
        if saved is None:
            raise _differs(key, cache.results)
        if saved.was_written():  # communicate again this time; later forwards save a copy
            cache.copies.add(key)
            return collective(*args)
        return saved.restore()

    def remembered(self, name: str, make: Callable[[], Any]) -> Any:
        key, values = self.next_key(name), self.cache.values
        if not self.replay:
            values[key] = make()
        elif key not in values:
            raise _differs(key, values)
        return values[key]


def _differs(key: ResultKey, saved: dict[ResultKey, Any]) -> ModelError:
    kind, number = key
    count = sum(other == kind for other, _ in saved)
    return ModelError(
        Problem(
            "replay-differs",
            f"a recomputed forward reaches {kind} number {number + 1}, but the first forward had {count}",
            fix="a unit's forward must be repeatable: no counter, cache or `training` flag may change in between",
        )
    )


def run_collective(kind: str, collective: Callable[..., Any], *args: Any) -> Any:
    """`collective(*args)`; in a replay the result of the first forward, if the unit saves results of this kind.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ring_attention".
        collective: returns a new tensor or a list of new tensors, and keeps no reference to them.

    Raises: ModelError `replay-differs`.
    """
    if torch.compiler.is_compiling():  # a compiled graph decides itself what it recomputes
        return collective(*args)
    current = _CURRENT.run
    if current is None or kind not in current.cache.kinds:
        return collective(*args)
    return current.run_collective(kind, collective, args)


def may_overwrite() -> bool:
    """Whether a collective may work in place on its input; not if that input, or its result, is saved."""
    if torch.compiler.is_compiling():
        return True
    current = _CURRENT.run
    return current is None or current.cache.overwrites


def remembered(name: str, make: Callable[[], Any]) -> Any:
    """`make()`; in a replay the value that it returned in the forward, in the same order.

    Args:
        name: distinguishes the values of different callers.

    Raises: ModelError `replay-differs`.
    """
    current = _CURRENT.run
    return make() if current is None else current.remembered(name, make)


def is_remembered(name: str) -> bool:
    """Whether this is a replay in which `remembered(name, ...)` has a value of the forward."""
    current = _CURRENT.run
    return current is not None and current.replay and current.has_next(name)


def pass_number() -> int:
    """A number of the running pass that no other pass has; 0 outside."""
    current = _CURRENT.run
    return 0 if current is None else current.number


def at_exit(call: Callable[[], None]) -> None:
    """Call a function when the running pass ends; outside of one it is not called."""
    current = _CURRENT.run
    if current is not None:
        current.at_exit(call)


def in_recompute() -> bool:
    """Whether the running forward is a replay in backward."""
    current = _CURRENT.run
    return current is not None and current.replay


def replay_key() -> Any:
    """An object that is the same in a recomputed unit's forward and in all of its replays; None outside such units.

    Reference it weakly: it lives as long as the graph of that forward, and so does everything saved for the replay.
    """
    current = _CURRENT.run
    return None if current is None else current.cache
