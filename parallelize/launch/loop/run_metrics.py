"""What is logged of each step: the console line, files, TensorBoard, Weights & Biases, the page."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelize.axes.tensor.experts.expert_load import EXPERT, RANK
from parallelize.base.files.paths import read_small
from parallelize.launch.config.run_config import MetricsSection, RunConfig
from parallelize.launch.loop.profiled_step import ProfiledStep
from parallelize.launch.loop.run_page import RunPage
from parallelize.state.loop.loggers import ConsoleLogger, JSONLinesLogger, Loggers, TensorBoardLogger
from parallelize.state.loop.wandb_logger import WandbLogger

_WANDB_ID = "wandb-run.txt"
_PAGE_EVERY = 50


class RunMetrics:
    """Numbers of steps, on rank 0 alone; the other ranks build it with `enabled=False`.

    Args:
        tokens_per_step: of all data ranks.
        flops_per_step: 0 where nothing is predicted, then there is no MFU.
        peak_flops: of all devices together, in operations per second.
        heading: of the page.

    Raises: ParallelizeError `missing-extra`; OSError.
    """

    def __init__(
        self,
        config: RunConfig,
        tokens_per_step: int,
        flops_per_step: float,
        peak_flops: float,
        heading: str,
        enabled: bool,
    ):
        self.tokens, self.flops, self.peak = tokens_per_step, flops_per_step, peak_flops
        section = config.metrics
        self._path = Path(section.html) if section.html and enabled else None
        self.page = RunPage(heading) if self._path is not None else None
        self._loggers = Loggers(_writers(section, config, heading, enabled) if enabled else [], enabled=enabled)
        self._comm: dict[str, float] = {}
        self._logged = 0

    def log(
        self,
        step: int,
        loss: float,
        norm: float,
        rate: float,
        seconds: float,
        memory: float,
        profile: ProfiledStep | None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """One step's numbers. memory: bytes of the rank with most. profile: of a profiled step, whose time is not typical. more: by tag."""
        if profile is not None:
            self._comm = profile.scalars()
        scalars: dict[str, Any] = {"loss": loss, "grad_norm": norm, "lr": rate}
        scalars["tokens_per_s"] = self.tokens / seconds
        if self.flops and self.peak:
            scalars["mfu"] = self.flops / seconds / self.peak
        scalars |= {"memory_gib": memory / 2**30, **(more or {}), **self._comm}
        self._loggers.log(scalars, step)
        if self.page is not None:
            self.page.log(scalars, step)
            self.page.profiled = profile or self.page.profiled
            self._logged += 1
            if self._logged % _PAGE_EVERY == 0:
                self.write_page()

    def write_page(self) -> None:
        if self.page is not None and self._path is not None:
            self.page.write(self._path)

    def close(self) -> None:
        """Write the page and close the loggers."""
        self.write_page()
        self._loggers.close()


def _writers(section: MetricsSection, config: RunConfig, heading: str, enabled: bool) -> list[Any]:
    writers: list[Any] = [ConsoleLogger(every=section.every, formats={"imbalance": ".1%", EXPERT: ".2f", RANK: ".2f"})]
    if section.jsonl:
        writers.append(JSONLinesLogger(section.jsonl))
    if section.tensorboard:
        writers.append(TensorBoardLogger(section.tensorboard))
    if section.wandb:
        writers.append(WandbLogger(section.wandb, {"run": heading, "file": config.text}, _wandb_run(config)))
    return writers


def _wandb_run(config: RunConfig) -> str | None:
    """The id of this run at Weights & Biases, beside its checkpoints, so that a run that goes on is the same one there."""
    if not config.checkpoints.folder:
        return None
    path = Path(config.checkpoints.folder) / "reports" / _WANDB_ID
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return read_small(path.parent, path.name, 1 << 10).decode().strip()
