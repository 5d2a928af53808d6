"""Metrics of a run, written where people look: console, JSON lines, TensorBoard, the Hub.

    with Loggers([ConsoleLogger(every=10), JSONLinesLogger("run/metrics.jsonl")], enabled=rank == 0) as logger:
        logger.log({"loss": loss, "grad_norm": norm, "tokens_per_s": rate}, step)

Every logger has the one method `log`, so one of your own is a class with that method. Units stand in the tags:
`tokens_per_s`, `memory_gib`; `loss`, `grad_norm` and `mfu` have none. Values may be 0-d tensors: they are read together,
with one wait for the device, and only when some logger writes at this step. Only one rank should write: every logger
takes `enabled`, and opens, creates and imports nothing where that is false.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from parallelize.errors import ParallelizeError, Problem, ShapeError

_log = logging.getLogger("parallelize")


class Logger(Protocol):
    """Whatever takes tagged numbers. `close()` is called at the end where there is one."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the numbers (floats, or 0-d tensors) of one optimiser step."""


class _Closing:
    """A logger that may be used as a context, with nothing to close unless it says so."""

    def close(self) -> None:
        """Write what is left and free what is open. Twice does no harm."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Plain floats, with one wait per device however many tensors there are.

    Raises: ShapeError `not-a-scalar`, for a tensor of several elements, a DTensor that is split, or no number at all.
    """
    checked = {tag: _scalar(tag, value) for tag, value in scalars.items()}
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for tag, value in checked.items():
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, {})[tag] = value
    for device, tensors in by_device.items():
        dtype = torch.float32 if device.type == "mps" else torch.float64  # counts of tokens do not fit float32
        read = torch.stack([tensor.to(dtype) for tensor in tensors.values()]).tolist()
        checked.update(zip(tensors, read, strict=True))
    return checked


def _scalar(tag: str, value: Any) -> Any:
    """A 0-d tensor without history, or a float."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if not hasattr(value, "placements"):
            return value.detach().reshape(())
        if all(placement.is_replicate() for placement in value.placements):
            return value.detach().to_local().reshape(())
    elif not isinstance(value, (torch.Tensor, str)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    what = f"{tag!r} is a {type(value).__name__}" + (f" {list(value.shape)}" if isinstance(value, torch.Tensor) else "")
    fix = "log a number or a 0-d tensor; of a DTensor that is split, `full_tensor()`, called on every rank"
    raise ShapeError(Problem("not-a-scalar", what, fix=fix))


class _ReadOnce(Mapping[str, float]):
    """Scalars that several loggers share: read from the device when the first of them asks, and never again."""

    def __init__(self, scalars: Mapping[str, Any]):
        self._raw = scalars
        self._read: dict[str, float] | None = None

    def __getitem__(self, tag: str) -> float:
        if self._read is None:
            self._read = to_numbers(self._raw)
        return self._read[tag]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


FORMATS = {
    "loss": ".4f",
    "grad_norm": ".3f",
    "lr": ".2e",
    "mfu": ".1%",
    "tokens_per_s": ",.0f",
    "memory_gib": ".2f",
}
"""How the console writes the usual tags; others get five digits."""


class ConsoleLogger(_Closing):
    """One aligned line for people.

    Args:
        tags: which to show, in this order, with "-" for one that is absent; all that come by default.
        formats: format specifications by tag, above `FORMATS`.
        every: write the steps that this divides.
        file: where to, standard output by default.
    """

    def __init__(
        self,
        tags: Sequence[str] | None = None,
        formats: Mapping[str, str] | None = None,
        every: int = 1,
        file: TextIO | None = None,
        enabled: bool = True,
    ):
        if every < 1:
            raise ParallelizeError(Problem("bad-every", f"every {every} steps is never", fix="use 1 or more"))
        self._tags, self._every, self._file, self._enabled = tags, every, file, enabled
        self._formats = {**FORMATS, **(formats or {})}
        self._widths: dict[str, int] = {}

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Print `step 40  loss 3.0862  tokens_per_s 4,453` when it is this step's turn."""
        if not self._enabled or step % self._every:
            return
        numbers = to_numbers(scalars)
        shown = list(numbers) if self._tags is None else list(self._tags)
        if any(tag in numbers for tag in shown):
            cells = [self._cell("step", str(step))]
            cells += [self._cell(tag, self._text(tag, numbers.get(tag))) for tag in shown]
            print("  ".join(cells), file=self._file, flush=True)

    def _cell(self, tag: str, text: str) -> str:
        """The text as wide as the widest so far, so that columns stay under each other."""
        self._widths[tag] = max(self._widths.get(tag, 5 if tag == "step" else 0), len(text))
        return f"{tag} {text:>{self._widths[tag]}}"

    def _text(self, tag: str, value: float | None) -> str:
        if value is None:
            return "-"
        whole = math.isfinite(value) and value == int(value)
        return format(value, self._formats.get(tag, ",.0f" if whole else ".5g"))


class JSONLinesLogger(_Closing):
    """One JSON object a line, appended: `{"step": 3, "time_s": 1735689600.0, "loss": 2.5}`, written at once.

    `time_s` is Unix time. JSON has no NaN: those are the strings "NaN", "Infinity", "-Infinity", which `float()` reads.
    Folders that are absent are made. Raises: OSError; ParallelizeError `reserved-tag`.
    """

    def __init__(self, path: str | os.PathLike[str], enabled: bool = True):
        self._file: TextIO | None = None
        if enabled:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            cut = _ends_within_a_line(Path(path))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
            self._file.write("\n" if cut else "")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line."""
        if self._file is None:
            return
        reserved = sorted({"step", "time_s"} & set(scalars))
        if reserved:
            what = f"{reserved[0]!r} is written by the logger itself"
            raise ParallelizeError(Problem("reserved-tag", what, fix="use another tag"))
        numbers = {tag: _json_number(value) for tag, value in to_numbers(scalars).items()}
        line = {"step": int(step), "time_s": round(time.time(), 3), **numbers}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; what is logged later is dropped."""
        file, self._file = self._file, None  # first, for closing writes too and may fail
        if file is not None:
            file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether the run that wrote this file was killed while writing: its half line must not swallow ours."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


class TensorBoardLogger(_Closing):
    """TensorBoard's event files in a folder. Needs the package tensorboard.

    Raises: ParallelizeError `missing-extra`.
    """

    def __init__(self, folder: str | os.PathLike[str], enabled: bool = True):
        self._writer: Any = None
        if enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("TensorBoardLogger", "tensorboard", error) from None
            self._writer = SummaryWriter(os.fspath(folder))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add one point to each tag's curve; files are written every two minutes and at the end."""
        if self._writer is not None:
            for tag, value in to_numbers(scalars).items():
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what is left; what is logged later is dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _missing(who: str, package: str, error: ImportError) -> ParallelizeError:
    what = f"{who} needs the package {package} ({error})"
    return ParallelizeError(Problem("missing-extra", what, fix=f"pip install {package}"))


class HubLogger(_Closing):
    """JSON lines in a folder that a thread uploads to the Hub every few minutes. Needs huggingface_hub.

    The folder's other `.jsonl` and TensorBoard event files (and nothing else in it) go up with them: point
    `TensorBoardLogger` there. Who may write is huggingface_hub's affair: log in before (`hf auth login`, or HF_TOKEN);
    nothing is asked, stored or printed here. An upload that fails is warned of once and tried again at the next turn.

    Args:
        repo_id: "user/name"; made if absent, `private` unless told otherwise.
        folder: where the files are kept, `metrics.jsonl` among them.
        every_minutes: between uploads.
    Raises: ParallelizeError `missing-extra`, `hub-refused`; OSError.
    """

    def __init__(
        self,
        repo_id: str,
        folder: str | os.PathLike[str],
        every_minutes: float = 5,
        path_in_repo: str = "logs",
        repo_type: str = "model",
        private: bool = True,
        enabled: bool = True,
    ):
        self._scheduler: Any = None
        self._lines = JSONLinesLogger(Path(folder) / "metrics.jsonl", enabled=enabled)
        self._repo_id, self._warned = repo_id, False
        if enabled:
            scheduler = _commit_scheduler()
            names = dict(repo_id=repo_id, repo_type=repo_type, private=private, path_in_repo=path_in_repo)
            try:
                self._scheduler = scheduler(
                    folder_path=folder, every=every_minutes, allow_patterns=["*.jsonl", "*tfevents*"], **names
                )
            except Exception as error:
                raise _refused(repo_id, error) from error

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line to `metrics.jsonl`, which the next upload takes along."""
        if self._scheduler is None:
            return
        numbers = to_numbers(scalars)
        with self._scheduler.lock:  # so that no upload sees half a line
            self._lines.log(numbers, step)
        last = getattr(self._scheduler, "last_future", None)
        if last is not None and last.done() and last.exception() is not None:
            self._warn(last.exception())

    def close(self) -> None:
        """Upload what is left and stop the thread; what is logged later is dropped."""
        self._lines.close()
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            try:
                scheduler.trigger().result()
            except Exception as error:
                self._warn(error)
            scheduler.stop()

    def _warn(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("metrics were not uploaded to %s, but are kept on disk: %s", self._repo_id, _first_line(error))


def _commit_scheduler() -> Any:
    try:
        from huggingface_hub import CommitScheduler
    except ImportError as error:
        raise _missing("HubLogger", "huggingface_hub", error) from None
    return CommitScheduler


def _refused(repo_id: str, error: Exception) -> ParallelizeError:
    fix = "log in with `hf auth login`, check the name and the network, or leave HubLogger out"
    return ParallelizeError(Problem("hub-refused", f"cannot open {repo_id} on the Hub: {_first_line(error)}", fix=fix))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Loggers(_Closing):
    """Several loggers as one. Values are read from the device once, when the first of them needs one.

    A logger that fails (disk full, no network) is warned of once, on the "parallelize" logger of `logging`, and tried
    again at later steps; it stops neither training nor the others. A mistake in what is logged is raised.
    """

    def __init__(self, loggers: Sequence[Logger], enabled: bool = True):
        self._loggers = list(loggers)
        self._enabled = enabled
        self._failures: dict[int, int] = {}

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Pass the numbers to every logger. Raises: ParallelizeError `not-a-scalar`, `reserved-tag`."""
        if not self._enabled:
            return
        shared = _ReadOnce(scalars)
        for place, logger in enumerate(self._loggers):
            try:
                logger.log(shared, step)
            except ParallelizeError:
                raise
            except Exception as error:
                self._failed(place, f"could not write step {step} ({_first_line(error)}); training goes on")

    def close(self) -> None:
        """Close all that can be closed, and say how much was lost."""
        for place, logger in enumerate(self._loggers):
            lost = self._failures.pop(place, 0)
            if lost:
                _log.warning("%s lost %d steps", type(logger).__name__, lost)
            try:
                getattr(logger, "close", lambda: None)()
            except Exception as error:
                self._failed(place, f"could not be closed ({_first_line(error)})")

    def _failed(self, place: int, what: str) -> None:
        if place not in self._failures:
            _log.warning("%s %s", type(self._loggers[place]).__name__, what)
        self._failures[place] = self._failures.get(place, 0) + 1
