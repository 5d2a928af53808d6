"""Errors: where something is wrong, what is wrong (with numbers), and a fix.

    ParallelizeError
      PlanError         the plan file, or a plan that does not fit the model
      MeshError         mesh axes, sizes, ranks
      ShapeError        a tensor that cannot be split as requested
      DataError         a data set or loader that does not give each rank its samples
      ModelError        a model, or a call of it, that the plan does not support
      HandshakeError    ranks that disagree, before any data is sent
      PipelineError     a step that failed on some rank
      GradientError     gradients that are not finite
      CheckpointError   a checkpoint that cannot be written, or whose contents do not match its manifest
      LaunchError       a run that cannot be started: its file, its environment, its hosts

Imports neither torch nor anything of this package.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from parallelize.base.package import NAME


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        slug: its stable name, which tests and users match. All other text may be reworded.
        what: one sentence, with numbers.
        where: a file and line, or a rule.
        rows: (label, text) lines with details.
        fix: what to do.
    """

    slug: str
    what: str
    where: str = ""
    rows: tuple[tuple[str, str], ...] = field(default=())
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.slug}: {self.what}" if self.where else f"{self.slug}: {self.what}"
        rows = [*self.rows, ("fix", self.fix)] if self.fix else list(self.rows)
        width = max((len(label) for label, _ in rows), default=0)
        return printable("\n".join([head, *(f"  {label:<{width}}  {text}" for label, text in rows)]))


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text for a terminal: characters that would control it, or turn the direction of text, are escaped. Names in files
    may have them."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line that led here: the innermost one that is neither of this package nor of torch, which
    calls it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not is_of_caller(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def is_of_caller(frame: FrameType) -> bool:
    """Whether a frame is neither of this package nor of torch."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in (NAME, "torch")


_NUMBER = re.compile(r"(?<=[A-Za-z_])\.\d+(?=[.:,\s]|$)")  # of a layer, in a name


def folded(problems: Sequence[Problem]) -> Iterator[str]:
    """The texts of problems; of those that differ in the numbers of layers alone, the first one and how many there
    are."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(_NUMBER.sub(".*", str(problem)), []).append(problem)
    for first, *others in alike.values():
        more = f" (and {len(others)} more, in other layers)" if others else ""
        yield str(replace(first, what=first.what + more))


class ParallelizeError(Exception):
    """The base of all errors that a user can cause. Its text shows problems that all layers have once.

    Args:
        problems: at least one.
    """

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(folded(problems)))

    def __reduce__(self):
        return type(self), self.problems

    @property
    def slugs(self) -> tuple[str, ...]:
        """The slugs of the problems, in order."""
        return tuple(problem.slug for problem in self.problems)


class PipelineError(ParallelizeError):
    """A pipeline step that failed. Every rank of the mesh raises it."""


class GradientError(ParallelizeError, RuntimeError):
    """Gradients that are not finite. Every rank raises it; a RuntimeError, as in `torch.nn.utils.clip_grad_norm_`."""


class CheckpointError(ParallelizeError):
    """A checkpoint that cannot be written, or whose contents do not match its manifest."""


class LaunchError(ParallelizeError):
    """A run that cannot be started: its file, its environment, or its hosts."""


class PlanError(ParallelizeError):
    """A plan that cannot be read, or that does not fit the model."""


class MeshError(ParallelizeError):
    """Axes, sizes or ranks that do not form a valid mesh."""


class ShapeError(ParallelizeError):
    """A tensor that cannot be split, gathered or reduced as requested."""


class DataError(ParallelizeError):
    """A data set or a loader that does not give each rank the samples of its data rank."""


class ModelError(ParallelizeError):
    """A model, or a call of it, that the plan does not support."""


class HandshakeError(ParallelizeError):
    """Ranks that disagree about the plan, the model or settings."""


def near(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The names in `known` that are similar to `word`, best first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A fix for a misspelled word: similar names, or else the known ones."""
    names = sorted(set(known))
    close = near(word, names)
    if close:
        return "did you mean " + " or ".join(f"`{name}`" for name in close) + "?"
    return "known: " + short_list(names)


def short_list(names: Sequence[str], most: int = 12) -> str:
    """The first names, joined by commas, and the number of the others."""
    shown = ", ".join(names[:most])
    return shown + (f", and {len(names) - most} more" if len(names) > most else "")
