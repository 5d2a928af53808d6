"""Whether a step is faster in pairs of a forward and a backward, or in order: measured in the first steps of training.

The two give the same numbers (see `interleaved_actions.py`), so that the steps that are compared are steps of training. They take
turns: in pairs, in order, in pairs, ... Every rank decides by the sums of all ranks' times, which are equal on all of them and
travel with the sums that a step has anyway, one step later.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

WARM_UP = 2  # steps: the first of each kind calibrates, compiles and allocates
COMPARED = 5  # steps of each kind


class PairTrial:
    """The measurement of one model.

    Args:
        report: called with a sentence about the choice, once.

    Attributes:
        in_pairs: whether the next step runs in pairs.
        own_s: the seconds of this rank's last step, which the others have not got; None: there is none to tell.
    """

    def __init__(self, report: Callable[[str], None]):
        self.report = report
        self.in_pairs = True
        self.own_s: float | None = None
        self._steps = 0
        self._was_in_pairs = True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def is_running(self) -> bool:
        """Whether steps are still compared."""
        return len(self._seconds[False]) < COMPARED

    def end_step(self, own_s: float) -> None:
        """A step has ended on every rank, without a failure."""
        if not self.is_running:
            return
        self._steps += 1
        self._was_in_pairs = self.in_pairs
        self.own_s = own_s if self._steps > WARM_UP else None
        self.in_pairs = not self.in_pairs

    def take(self, mean_s: float) -> None:
        """The mean over all ranks of the step before this one, equal on all of them."""
        if self.own_s is None:
            return
        self.own_s = None
        self._seconds[self._was_in_pairs].append(mean_s)
        if not self.is_running:
            pairs, order = (1e3 * median(self._seconds[kind]) for kind in (True, False))
            self._choose(pairs, order)

    def _choose(self, pairs_ms: float, order_ms: float) -> None:
        self.in_pairs = pairs_ms < order_ms
        chosen = "in pairs" if self.in_pairs else "in order"
        self.report(
            f"a step of microbatches beside each other takes {pairs_ms:.1f} ms, one in order {order_ms:.1f} ms "
            f"(medians of {COMPARED}): {chosen} from now on"
        )
