"""What a user sees when something is wrong: where, what (with numbers), why, and a fix.

    ParallelizeError
      PlanError         the plan file, or a plan that does not fit the model
      MeshError         mesh axes, sizes, ranks
      ShapeError        a tensor that cannot be split as asked
      ModelError        a model that cannot be planned as it is
      HandshakeError    ranks that disagree, found before any data is sent
      PipelineError     a step that failed on some rank
      GradientError     gradients that are not finite
      CheckpointError   a checkpoint that cannot be written, or that is not what it says

Floor 0: imports nothing of the project, nor torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One finding. `slug` is stable: tests and users match it, so the prose may improve."""

    slug: str
    what: str
    where: str = ""
    rows: tuple[tuple[str, str], ...] = field(default=())
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.slug}: {self.what}" if self.where else f"{self.slug}: {self.what}"
        rows = [*self.rows, ("fix", self.fix)] if self.fix else list(self.rows)
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join([head, *(f"  {label:<{width}}  {text}" for label, text in rows)])


class ParallelizeError(Exception):
    """Every mistake a user can make raises one of these, never an AssertionError."""

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self):
        return type(self), self.problems

    @property
    def slugs(self) -> tuple[str, ...]:
        return tuple(problem.slug for problem in self.problems)


class PipelineError(ParallelizeError):
    """A step of a pipeline that failed, on every rank of the mesh."""


class GradientError(ParallelizeError, RuntimeError):
    """Gradients that cannot be used, on every rank; a RuntimeError, as PyTorch's own clipping raises."""


class CheckpointError(ParallelizeError):
    """A checkpoint that cannot be written, or that is not what it says it is."""


class PlanError(ParallelizeError):
    """A plan that cannot be read, or that does not fit its model."""


class MeshError(ParallelizeError):
    """Axes, sizes or ranks that make no mesh."""


class ShapeError(ParallelizeError):
    """A tensor that cannot be split, gathered or reduced as asked."""


class ModelError(ParallelizeError):
    """A model, or a call of it, that the plan cannot serve."""


class HandshakeError(ParallelizeError):
    """Ranks that disagree about plan, model or settings."""


def near(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The names in `known` that look like `word`, best first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A fix for a misspelt word, or what is known when nothing is near."""
    names = sorted(set(known))
    close = near(word, names)
    if close:
        return "did you mean " + " or ".join(f"`{name}`" for name in close) + "?"
    return "known: " + short_list(names)


def short_list(names: Sequence[str], most: int = 12) -> str:
    """Names joined by commas, cut off with a count."""
    shown = ", ".join(names[:most])
    return shown + (f", and {len(names) - most} more" if len(names) > most else "")
