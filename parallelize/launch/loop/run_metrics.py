"""What is logged of each step: the console line, files, TensorBoard, Weights & Biases, the page."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from parallelize.axes.tensor.experts.routing_load import EXPERT, RANK
from parallelize.base.files.paths import read_small
from parallelize.base.pictures.html import document, figure, heading, paragraph, section, table
from parallelize.base.pictures.svg import WIDTH, axis_below, axis_left, box, line, picture, text_at, time_scale
from parallelize.launch.config.run_config import MetricsSection, RunConfig
from parallelize.launch.loop.profiled_step import ProfiledStep
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
        tokens_per_step: float,
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
        """One step's numbers. memory: bytes of the rank with most. profile: of a profiled step, whose time is not
        typical. more: by tag."""
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
    """The id of this run at Weights & Biases, beside its checkpoints, so that a run that goes on is the same one
    there."""
    if not config.checkpoints.folder:
        return None
    path = Path(config.checkpoints.folder) / "reports" / _WANDB_ID
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return read_small(path.parent, path.name, 1 << 10).decode().strip()


# -- run page --------------------------------------------------------------------------------------------------------
# The page of a run: curves of loss and throughput, memory beside the prediction, the timeline of a profiled step. No
# scripts.


_HEIGHT, _LEFT, _TOP, _FLOOR = 220, 70, 24, 180
_MOST_POINTS = 600
_COLORS = ("c0", "c1", "c2", "c3", "c4", "c5", "c7", "c6")


@dataclass
class RunPage:
    """Collects what the page shows. heading: what the run is.

    Attributes:
        points: tag to (step, value). peaks: (name, measured bytes, predicted bytes; 0 where there is no prediction).
    """

    heading: str
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    peaks: list[tuple[str, float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    profiled: ProfiledStep | None = None

    def log(self, scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            self.points.setdefault(tag, []).append((step, float(value)))

    def write(self, path: Path) -> None:
        """Replace the page at once. Raises: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(self.as_html(), encoding="utf-8")
        os.replace(temporary, path)

    def as_html(self) -> str:
        body = [heading(self.heading), *map(paragraph, self.notes)]
        for tag, title in (("loss", "Loss"), ("tokens_per_s", "Tokens per second"), ("memory_gib", "Memory in GiB")):
            if self.points.get(tag):
                body.append(section(title, figure(curve(title, self.points[tag]))))
        if self.peaks:
            body.append(section("Peak memory beside the prediction", _peaks(self.peaks)))
        others = [tag for tag in self.points if tag.startswith("comm_") or tag in ("imbalance", "mfu", "grad_norm")]
        body += [section(escape(tag), figure(curve(tag, self.points[tag]))) for tag in others]
        if self.profiled is not None and self.profiled.spans:
            body.append(section("A profiled step of rank 0", figure(timeline(self.profiled))))
        return document(self.heading, body)


def curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """A line through points; values that are not finite leave a gap, and are marked at the bottom."""
    stride = max(1, len(points) // _MOST_POINTS)
    shown = list(points[::stride])
    finite = [value for _, value in shown if value == value and abs(value) != float("inf")]
    top, last = max(finite, default=1.0) or 1.0, max(step for step, _ in shown) or 1

    def x_of(step: int) -> float:
        return _LEFT + (WIDTH - _LEFT - 20) * step / last

    def y_of(value: float) -> float:
        return _FLOOR - (_FLOOR - _TOP) * max(value, 0.0) / top

    body = [*axis_left(_LEFT, WIDTH - 20, y_of, top, ""), *axis_below(_LEFT, WIDTH - 20, _TOP, _FLOOR, last, "step")]
    good = [value == value and abs(value) != float("inf") for _, value in shown]
    for index, (step, value) in enumerate(shown):
        if not good[index]:
            body.append(text_at(x_of(step), _FLOOR - 4, "NaN", "middle", "warn", 11))
        elif index and good[index - 1]:
            before = shown[index - 1]
            body.append(line((x_of(before[0]), y_of(before[1])), (x_of(step), y_of(value)), "edge"))
        else:
            body.append(box(x_of(step) - 1.5, y_of(value) - 1.5, 3, 3, "c0", f"step {step}: {value:g}"))
    return picture(title, WIDTH, _HEIGHT, body)


def _peaks(peaks: Sequence[tuple[str, float, float]]) -> str:
    rows = [
        (name, f"{measured / 1e6:,.0f} MB", f"{predicted / 1e6:,.0f} MB" if predicted else "-")
        for name, measured, predicted in peaks
    ]
    return table(("rank", "measured", "predicted (tensors)"), rows, numbers=(1, 2))


def timeline(profiled: ProfiledStep) -> str:
    """Modules by depth, and the collectives of each axis, over the time of a step."""
    end = max([profiled.step_s, *(stop for *_, stop in profiled.spans)])
    factor, unit = time_scale(end)
    rows = sorted({row for row, *_ in profiled.spans}, key=lambda row: (not row.startswith("modules"), row))
    floor = _TOP + 26 * len(rows)
    scale = (WIDTH - 130) / (end or 1.0)
    body = axis_below(110, WIDTH - 20, _TOP, floor, end * factor, unit)
    body += [text_at(104, _TOP + 26 * index + 16, row, "end", "quiet", 11) for index, row in enumerate(rows)]
    for row, name, start, stop in profiled.spans:
        index = rows.index(row)
        hint = f"{name}: {(stop - start) * factor:.3f} {unit}"
        color = f"{_COLORS[index % len(_COLORS)]} frame"
        body.append(box(110 + start * scale, _TOP + 26 * index + 2, (stop - start) * scale, 20, color, hint))
    return picture("a profiled step", WIDTH, floor + 40, body)
