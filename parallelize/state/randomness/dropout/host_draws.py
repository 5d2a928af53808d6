"""What a forward draws by Python's `random` and by NumPy: LayerDrop, and masks of spans, in some models.

No call of theirs can be seen. So a forward that draws from them begins with states that are functions of seed and step,
and the states of before are set again after it. Python's is that of the whole step: its draws, one number each, are for
all rows. NumPy's, by which models draw for rows, is that of the first row too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from parallelize.ops.random.counter import key
from parallelize.state.randomness.dropout.position import Clock

_SITE = "generators of the host"


class HostGenerators:
    """The generators of Python and NumPy, for the forwards of one model.

    drawn: those from which a forward has drawn: they are set for each forward.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.drawn: set[str] = set()
        self._before: dict[str, Any] = {}
        self._set: dict[str, Any] = {}

    def begin(self, is_first: bool) -> None:
        """is_first: set both, to see at the end which have moved."""
        if self.clock.agree_later or not (self.drawn or is_first):
            return
        names = {"python", "numpy"} if is_first else self.drawn
        self._before = host_states(names)
        if self.drawn:
            self.clock.call(_SITE)
        assert self.clock.now is not None
        position, seed = self.clock.now.position, self.clock.agreed_seed()
        kind = "training" if self.clock.now.training else "evaluation"
        if "python" in self._before:
            random.seed(key(seed, f"python {kind}", position.step).start)
        if "numpy" in self._before:
            start = key(seed, f"numpy {kind}", position.step, position.batch_offset).start
            sys.modules["numpy"].random.seed(start % 2**32)
        self._set = host_states(names) if is_first else {}

    def has_moved(self) -> bool:
        """Whether the forward, the first of its mode, has drawn from one of them."""
        return any(self._moved())

    def _moved(self) -> Iterator[str]:
        now = host_states(self._set)
        yield from (name for name, state in self._set.items() if not _same(state, now[name]))

    def end(self) -> None:
        if not self._before:
            return
        had_drawn = bool(self.drawn)
        self.drawn |= set(self._moved())
        if self.drawn and not had_drawn:
            self.clock.call(_SITE)  # so that this forward counts
        set_host_states(self._before)
        self._before, self._set = {}, {}


def host_states(names: Iterable[str]) -> dict[str, Any]:
    """The states of those that are imported, as they give them themselves."""
    numpy, states = sys.modules.get("numpy"), {}
    if "python" in names:
        states["python"] = random.getstate()
    if "numpy" in names and numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def set_host_states(states: dict[str, Any]) -> None:
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _same(first: Any, second: Any) -> bool:
    """Whether two states are equal: tuples, in which NumPy has an array."""
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(first, second, strict=True))
