"""Metrics of a run in Weights & Biases, by its own client. Needs the package wandb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelize.state.loop.loggers import ClosingLogger, missing_extra, to_numbers


class WandbLogger(ClosingLogger):
    """A run of a project of Weights & Biases. Log in before (`wandb login`, or WANDB_MODE=offline).

    Args:
        project: the project.
        config: plain values that describe the run.
        run_id: of a run that is continued after a restart; None begins one.
        enabled: False opens and imports nothing.

    Raises: ParallelizeError `missing-extra`.
    """

    def __init__(
        self, project: str, config: Mapping[str, Any] | None = None, run_id: str | None = None, enabled: bool = True
    ):
        self._run: Any = None
        if enabled:
            try:
                import wandb
            except ImportError as error:
                raise missing_extra("WandbLogger", "wandb", error) from None
            self._run = wandb.init(
                project=project, config=dict(config or {}), id=run_id, resume="allow" if run_id else None
            )

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the `scalars` of a `step`."""
        if self._run is not None:
            self._run.log(to_numbers(scalars), step=step)

    def close(self) -> None:
        """Finish the run; later values are dropped."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
