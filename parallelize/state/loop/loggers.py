"""Metrics of a run, written to the console, to JSON lines, to TensorBoard and to the Hub.

    with Loggers([ConsoleLogger(every=10), JSONLinesLogger("run/metrics.jsonl")], enabled=rank == 0) as logger:
        logger.log({"loss": loss, "grad_norm": norm, "tokens_per_s": rate}, step)

A logger is any object with the method `log`. Units are part of the tags, as in `tokens_per_s` and `memory_gib`; `loss`,
`grad_norm` and `mfu` have none. Values may be 0-d tensors: they are read together, with one wait for the device, and
only when some logger writes at this step. Only one rank should write: every logger takes `enabled`, and opens, creates
and imports nothing if that is false.
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

from parallelize.base.errors import ParallelizeError, Problem, ShapeError

_log = logging.getLogger("parallelize")


class Logger(Protocol):
    """An object that takes tagged numbers. `close()` is called at the end if it exists."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the numbers of one optimizer step.

        Args:
            scalars: tag -> float or 0-d tensor.
            step: the training step.
        """


class ClosingLogger:
    """A logger that can be used as a context manager, with nothing to close by default."""

    def close(self) -> None:
        """Write pending values and close open files. May be called twice."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Plain floats, with one wait per device for any number of tensors.

    Raises: ShapeError `not-a-scalar` for a tensor of several elements, a sharded DTensor, or something that is no
        number.
    """
    checked = {tag: _scalar(tag, value) for tag, value in scalars.items()}
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for tag, value in checked.items():
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, {})[tag] = value
    for device, tensors in by_device.items():
        dtype = torch.float32 if device.type == "mps" else torch.float64  # float32 is too narrow for counts of tokens
        read = torch.stack([tensor.to(dtype) for tensor in tensors.values()]).tolist()
        checked.update(zip(tensors, read, strict=True))
    return checked


def _scalar(tag: str, value: Any) -> Any:
    """A 0-d tensor without history, or a float."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if not hasattr(value, "placements"):
            return value.detach().reshape(())
        if all(placement.is_replicate() for placement in value.placements):
            return value.detach().to_local().reshape(())  # type: ignore[attr-defined]  # a DTensor, by its placements
    elif not isinstance(value, (torch.Tensor, str)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    what = f"{tag!r} is of type {type(value).__name__}" + (
        f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    )
    fix = "log a number or a 0-d tensor; for a sharded DTensor call `full_tensor()` on every rank"
    raise ShapeError(Problem("not-a-scalar", what, fix=fix))


class _ReadOnce(Mapping[str, float]):
    """Scalars for several loggers, read from the device once, when the first logger needs them."""

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
"""Formats of the usual tags on the console; others get five digits."""


class ConsoleLogger(ClosingLogger):
    """One aligned line per step.

    Args:
        tags: which to show, in this order, with "-" for one that is absent. Default: all that are logged.
        formats: format specifications by tag, in addition to `FORMATS`.
        every: write the steps that this divides.
        file: what to write to. Default: standard output.
        enabled: False writes nothing.

    Raises: ParallelizeError `bad-every`.
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
            raise ParallelizeError(Problem("bad-every", f"every={every} would never write", fix="use 1 or more"))
        self._tags, self._every, self._file, self._enabled = tags, every, file, enabled
        self._formats = {**FORMATS, **(formats or {})}
        self._widths: dict[str, int] = {}

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Print the step and the `scalars`, if `every` divides the step: `step 40  loss 3.0862  tokens_per_s 4,453`."""
        if not self._enabled or step % self._every:
            return
        numbers = to_numbers(scalars)
        shown = list(numbers) if self._tags is None else list(self._tags)
        if any(tag in numbers for tag in shown):
            cells = [self._cell("step", str(step))]
            cells += [self._cell(tag, self._text(tag, numbers.get(tag))) for tag in shown]
            print("  ".join(cells), file=self._file, flush=True)

    def _cell(self, tag: str, text: str) -> str:
        """The text, padded to the widest so far, so that columns stay aligned."""
        self._widths[tag] = max(self._widths.get(tag, 5 if tag == "step" else 0), len(text))
        return f"{tag} {text:>{self._widths[tag]}}"

    def _text(self, tag: str, value: float | None) -> str:
        if value is None:
            return "-"
        is_integer = math.isfinite(value) and value == int(value)
        return format(value, self._formats.get(tag, ",.0f" if is_integer else ".5g"))


class JSONLinesLogger(ClosingLogger):
    """One JSON object per line, appended and flushed: `{"step": 3, "time_s": 1735689600.0, "loss": 2.5}`.

    `time_s` is Unix time. JSON has no NaN: such values are the strings "NaN", "Infinity" and "-Infinity", which
    `float()` accepts.

    Args:
        path: the path of the file. Missing folders are created.
        enabled: False opens nothing.

    Raises: OSError; ParallelizeError `reserved-tag`.
    """

    def __init__(self, path: str | os.PathLike[str], enabled: bool = True):
        self._file: TextIO | None = None
        if enabled:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            is_cut = _ends_within_a_line(Path(path))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
            self._file.write("\n" if is_cut else "")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line with the `scalars` of a `step`.

        Raises: ParallelizeError `reserved-tag`; ShapeError `not-a-scalar`.
        """
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
        """Close the file; later values are dropped."""
        file, self._file = self._file, None  # first, because closing writes too and may fail
        if file is not None:
            file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether the last line is incomplete, because its run was killed: the next line must not be joined to it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


class TensorBoardLogger(ClosingLogger):
    """TensorBoard event files in a folder. Needs the package tensorboard.

    Args:
        folder: the folder of the event files.
        enabled: False opens and imports nothing.

    Raises: ParallelizeError `missing-extra`.
    """

    def __init__(self, folder: str | os.PathLike[str], enabled: bool = True):
        self._writer: Any = None
        if enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise missing_extra("TensorBoardLogger", "tensorboard", error) from None
            self._writer = SummaryWriter(os.fspath(folder))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the `scalars` of a `step` to the curves of their tags. Files are written every two minutes and on
        `close`."""
        if self._writer is not None:
            for tag, value in to_numbers(scalars).items():
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write pending values; later values are dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def missing_extra(logger: str, package: str, error: ImportError) -> ParallelizeError:
    what = f"{logger} needs the package {package} ({error})"
    return ParallelizeError(Problem("missing-extra", what, fix=f"pip install {package}"))


class HubLogger(ClosingLogger):
    """JSON lines in a folder that a thread uploads to the Hub every few minutes. Needs huggingface_hub.

    The folder's other `.jsonl` files and TensorBoard event files are uploaded too, and nothing else in it: use the
    folder for `TensorBoardLogger`. Log in to huggingface_hub before (`hf auth login`, or HF_TOKEN); no credential is
    asked for, stored or printed here. A failed upload is reported once with a warning, and tried again at the next one.

    Args:
        repo_id: "user/name"; created if it does not exist.
        folder: the folder of the files, such as `metrics.jsonl`.
        every_minutes: between uploads.
        path_in_repo: the folder in the repository.
        repo_type: "model", "dataset" or "space".
        private: whether a repository that is created is private.
        enabled: False opens, imports and uploads nothing.

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
        """Append one line with the `scalars` of a `step` to `metrics.jsonl`, for the next upload."""
        if self._scheduler is None:
            return
        numbers = to_numbers(scalars)
        with self._scheduler.lock:  # so that no upload contains an incomplete line
            self._lines.log(numbers, step)
        last = getattr(self._scheduler, "last_future", None)
        if last is not None and last.done() and last.exception() is not None:
            self._warn(last.exception())

    def close(self) -> None:
        """Upload pending values and stop the thread; later values are dropped."""
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
        raise missing_extra("HubLogger", "huggingface_hub", error) from None
    return CommitScheduler


def _refused(repo_id: str, error: Exception) -> ParallelizeError:
    fix = "log in with `hf auth login`, check the name and the network, or leave HubLogger out"
    return ParallelizeError(Problem("hub-refused", f"cannot open {repo_id} on the Hub: {_first_line(error)}", fix=fix))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Loggers(ClosingLogger):
    """Several loggers as one. Values are read from the device once, when the first logger needs one.

    A logger that fails (disk full, no network) is reported once with a warning, on the "parallelize" logger of
    `logging`, and tried again at later steps; training and the other loggers go on. Errors in the values are raised.

    Args:
        loggers: each has a method `log`.
        enabled: False passes nothing on.
    """

    def __init__(self, loggers: Sequence[Logger], enabled: bool = True):
        self._loggers = list(loggers)
        self._enabled = enabled
        self._failures: dict[int, int] = {}

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Pass the `scalars` of a `step` to every logger. Raises: ParallelizeError `not-a-scalar`, `reserved-tag`."""
        if not self._enabled:
            return
        shared = _ReadOnce(scalars)
        for index, logger in enumerate(self._loggers):
            try:
                logger.log(shared, step)
            except ParallelizeError:
                raise
            except Exception as error:
                self._failed(index, f"could not write step {step} ({_first_line(error)}); training goes on")

    def close(self) -> None:
        """Close the loggers, and warn about steps that were not written."""
        for index, logger in enumerate(self._loggers):
            lost = self._failures.pop(index, 0)
            if lost:
                _log.warning("%s lost %d steps", type(logger).__name__, lost)
            try:
                getattr(logger, "close", lambda: None)()
            except Exception as error:
                self._failed(index, f"could not be closed ({_first_line(error)})")

    def _failed(self, index: int, what: str) -> None:
        if index not in self._failures:
            _log.warning("%s %s", type(self._loggers[index]).__name__, what)
        self._failures[index] = self._failures.get(index, 0) + 1
