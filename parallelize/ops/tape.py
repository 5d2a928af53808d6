"""What a recomputed forward remembers for its replay: results of collectives, and anything else that must be the same.

A recomputed unit runs its forward twice: once in the forward pass, and again in backward, to make the tensors that backward
needs. A *call* is one forward together with its replays; a *pass* is one run of it. While a pass is going on in this thread,

    sent(kind, send, ...)    communicates, or in a replay gives the result that was kept, where the unit keeps that kind
    remembered(what, make)   makes a value, or in a replay gives the one that was made then
    in_recompute()           whether this is a replay
    replay_key()             an object that stands for the call

Results come back in the order in which they were made, each kind by itself. Outside of a pass all of this costs one look at
a thread-local variable.

Source: Chen et al., arXiv:1604.06174 (recompute); Korthikanti et al., arXiv:2205.05198 (what is worth keeping).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from parallelize.errors import ModelError, Problem

Place = tuple[str, int]  # (kind, how many of that kind came before)


class _Now(threading.local):
    at: Pass | None = None


_NOW = _Now()


class Call:
    """One forward of a recomputed unit, with its replays. It lives as long as the graph of that forward.

    Args:
        keeps: the kinds of collectives whose results are kept.
        copies: places where the model writes to a result after it was received, so that a copy has to be kept; learnt
            from earlier calls of the unit, which share the set.
        overwrites: whether a collective may work in place on its input.
    """

    __slots__ = ("__weakref__", "copies", "keeps", "kept", "num_bytes", "overwrites", "values")

    def __init__(self, keeps: frozenset[str] = frozenset(), copies: set[Place] | None = None, overwrites: bool = True):
        self.keeps, self.overwrites = keeps, overwrites
        self.copies: set[Place] = set() if copies is None else copies
        self.kept: dict[Place, _Kept] = {}
        self.values: dict[Place, Any] = {}
        self.num_bytes = 0

    def keep(self, place: Place, out: Any) -> None:
        kept = self.kept[place] = _Kept(out, place in self.copies)
        self.num_bytes += sum(tensor.nbytes for tensor in kept.tensors)


class _Kept:
    """The result of one collective: a tensor, or a list of them."""

    __slots__ = ("copied", "several", "tensors", "versions")

    def __init__(self, out: Any, copied: bool):
        self.several, self.copied = isinstance(out, (list, tuple)), copied
        outs = out if self.several else [out]
        # apart from the result itself, which is about to become part of a graph
        self.tensors = [tensor.detach().clone() if copied else tensor.detach() for tensor in outs]
        self.versions = [tensor._version for tensor in self.tensors]

    def written(self) -> bool:
        """Whether somebody has changed the result since it was received."""
        return any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True))

    def again(self) -> Any:
        outs = [tensor.clone() if self.copied else tensor.detach() for tensor in self.tensors]
        return outs if self.several else outs[0]


class Pass:
    """A context: what runs inside belongs to `call`, as its forward or as a replay. A replay may be entered repeatedly."""

    __slots__ = ("_counts", "_outer", "call", "replay")

    def __init__(self, call: Call, replay: bool):
        self.call, self.replay = call, replay
        self._counts: dict[str, int] = {}
        self._outer: Pass | None = None

    def __enter__(self) -> Pass:
        self._counts = {}
        self._outer, _NOW.at = _NOW.at, self
        return self

    def __exit__(self, *error: Any) -> None:
        _NOW.at, self._outer = self._outer, None

    def place(self, kind: str) -> Place:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return kind, number

    def sent(self, kind: str, send: Callable[..., Any], args: tuple) -> Any:
        place, call = self.place(kind), self.call
        if not self.replay:
            out = send(*args)
            call.keep(place, out)
            return out
        kept = call.kept.get(place)
        if kept is None:
            raise _differs(place, len([one for one in call.kept if one[0] == kind]))
        if kept.written():  # send it again this once; from the next forward on a copy is kept
            call.copies.add(place)
            return send(*args)
        return kept.again()

    def remembered(self, what: str, make: Callable[[], Any]) -> Any:
        place, values = self.place(what), self.call.values
        if not self.replay:
            values[place] = make()
        elif place not in values:
            raise _differs(place, len([one for one in values if one[0] == what]))
        return values[place]


def _differs(place: Place, number: int) -> ModelError:
    return ModelError(
        Problem(
            "replay-differs",
            f"a recomputed forward comes to {place[0]} number {place[1] + 1}, and had {number} the first time",
            fix="a unit's forward must do the same again: no counters, caches or `training` that change in between",
        )
    )


def sent(kind: str, send: Callable[..., Any], *args: Any) -> Any:
    """`send(*args)`, which communicates; in a replay the result of then, where the unit keeps results of this kind.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        send: returns a new tensor or a list of new tensors, which it does not hold on to.

    Raises: ModelError `replay-differs`.
    """
    if torch.compiler.is_compiling():  # a graph decides by itself what it recomputes
        return send(*args)
    now = _NOW.at
    if now is None or kind not in now.call.keeps:
        return send(*args)
    return now.sent(kind, send, args)


def may_overwrite() -> bool:
    """Whether a collective may work in place on its input; not where that input, or its result, is kept."""
    if torch.compiler.is_compiling():
        return True
    now = _NOW.at
    return now is None or now.call.overwrites


def remembered(what: str, make: Callable[[], Any]) -> Any:
    """`make()`; in a replay the value that it gave in the forward, in order. `what` keeps its users apart.

    Raises: ModelError `replay-differs`.
    """
    now = _NOW.at
    return make() if now is None else now.remembered(what, make)


def in_recompute() -> bool:
    """Whether the forward that is going on is a replay in backward."""
    now = _NOW.at
    return now is not None and now.replay


def replay_key() -> Any:
    """What is the same object in a recomputed unit's forward and in each of its replays; None outside of such units.

    Hold it weakly: it lives as long as the graph of that forward, and what was kept for the replay lives with it.
    """
    now = _NOW.at
    return None if now is None else now.call
