"""Losses and gradients that are not finite, and losses far above those before: what to do, the same on every rank."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from parallelize.launch.config.run_config import AnomalySection

GOES_ON = ("ignore", "warn", "")


@dataclass(frozen=True)
class Anomaly:
    """Something unusual at a step. kind: nonfinite or spike. action: of `AnomalySection`."""

    kind: str
    action: str
    what: str


@dataclass
class AnomalyWatch:
    """Compares each loss with a window of those before. Losses and norms are the same on every rank, so its answers are too.

    Its state is saved with the run, so that a resumed run judges as one that goes on.
    """

    section: AnomalySection
    seen: int = 0
    _window: deque[float] = field(default_factory=deque)

    def judge(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        """What is wrong with a step; None where nothing is. A loss that is right joins the window."""
        anomaly = self._judge(step, loss, grad_norm)
        if anomaly is None or (anomaly.kind == "spike" and anomaly.action in GOES_ON):
            self._window.append(loss)
            if len(self._window) > self.section.window:
                self._window.popleft()
        if anomaly is not None:
            self.seen += 1
        return anomaly

    def _judge(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"step {step}: the loss is {loss:g}, the norm of gradients {grad_norm:g}"
            return Anomaly("nonfinite", self.section.nonfinite, what)
        if self.section.spike == "ignore" or len(self._window) < self.section.window:
            return None
        mean = sum(self._window) / len(self._window)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in self._window) / len(self._window))
        if loss <= mean + self.section.spike_factor * max(deviation, 1e-3 * abs(mean)):
            return None
        what = f"step {step}: the loss is {loss:.4g}, after {mean:.4g} +- {deviation:.2g} in the last {len(self._window)} steps"
        return Anomaly("spike", self.section.spike, what)

    @property
    def too_many(self) -> bool:
        return self.seen >= self.section.most

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "window": list(self._window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After going back to a checkpoint the number of anomalies is that of the process, not the saved one.

        The window has the file's length, which may be less than the saved one.
        """
        self.seen = max(self.seen, int(state["seen"]))
        self._window = deque(state["window"][-self.section.window :])
