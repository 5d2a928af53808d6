"""What a rebuilt failure is: a public report, what stands in its place here, and what the toolkit answers.

A loop is one function of a side of tests/matrix/sides.py, so that one process and each rank run the same text; a
mistake in a plan is a function that returns the plan, as tests/support/mutants.py makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from tests.matrix.axes import Axis
from tests.matrix.cells import RIGHT
from tests.matrix.kinds import KINDS, Kind
from tests.matrix.sides import Side
from tests.support.mutants import Mutant


@dataclass(frozen=True)
class Place:
    """Where a failure was rebuilt.

    Attributes:
        sizes, options: of `build_mesh` and `parallelize_model`.
        kind: of the model, of tests/matrix/kinds.py; overrides: config fields that differ.
        prepare: changes the model before it is placed, on both sides. others: further models, by kind.
        bound: the largest relative error. one_rank: the answer is that of a mesh of one rank, where draws are ours.
        processes: ranks are processes, not threads.
    """

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    kind: Kind = KINDS["llama"]
    overrides: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] | None = None
    others: int = 0
    bound: float = 1e-12
    one_rank: bool = False
    processes: bool = False

    @property
    def axis(self) -> Axis:
        return Axis(self.sizes, self.options)

    def models(self) -> list[Any]:
        models = [self.kind.build(**self.overrides) for _ in range(1 + self.others)]
        for number, model in enumerate(models[1:], start=1):
            _shift(model, number)
        if self.prepare is not None:
            torch.manual_seed(1)
            models[0] = self.prepare(models[0])
        return models


def _shift(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@dataclass(frozen=True)
class Failure:
    """A report, and what was made of it.

    Attributes:
        report: repository and number. month: of the report. symptom: what went wrong there.
        rebuilt: what stands here. answer: RIGHT, or the slug of what is found.
        run: the loop, or what returns the plan with the mistake.
        place: of a loop. told: what says so, where something does. subject: the file that it stands in.
    """

    report: str
    month: str
    symptom: str
    rebuilt: str
    answer: str
    run: Callable[..., Any]
    place: Place | None = None
    told: str = ""
    subject: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def link(self) -> str:
        repository, number = self.report.split("#")
        return f"[{self.report}](https://github.com/{repository}/issues/{number})"


FAILURES: dict[str, Failure] = {}


def _register(failure: Failure) -> None:
    assert failure.name not in FAILURES, failure.name
    FAILURES[failure.name] = replace(failure, subject=_subject())


def _subject() -> str:
    """The name of the file whose import is under way; rows are also made of functions that stand elsewhere."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    assert frame is not None
    return str(frame.f_globals["__name__"]).rpartition(".")[2]


def right(report: str, month: str, symptom: str, rebuilt: str, *, at: Place) -> Callable[[Any], Any]:
    """The loop gives the answer of one process."""

    def register(run: Callable[[Side], None]) -> Callable[[Side], None]:
        _register(Failure(report, month, symptom, rebuilt, RIGHT, run, at))
        return run

    return register


def refused(report: str, month: str, symptom: str, rebuilt: str, *, at: Place, by: str, slug: str) -> Any:
    """The loop raises an error with this slug; by: which call says so."""

    def register(run: Callable[[Side], None]) -> Callable[[Side], None]:
        _register(Failure(report, month, symptom, rebuilt, slug, run, at, by))
        return run

    return register


def found(report: str, month: str, symptom: str, rebuilt: str, *, by: str, slug: str = "") -> Any:
    """`lint` or `verify` finds the mistake in the plan that the function returns, with a model and a mesh."""

    def register(run: Callable[[], tuple[Mutant, Any, str]]) -> Any:
        _register(Failure(report, month, symptom, rebuilt, slug, run, None, by))
        return run

    return register


SUBJECTS = {
    "norms": "Norms and clipping",
    "losses": "Losses",
    "replicas": "Replicas and samples",
    "state": "Optimizers, averages and files",
    "plans": "Plans",
}
"""The files of rebuilt failures, with their titles on the page."""


def load_failures() -> dict[str, Failure]:
    """All of them by name, in the order of the page."""
    for module in SUBJECTS:
        import_module(f"tests.known_failures.{module}")
    return FAILURES


def by_subject() -> dict[str, list[Failure]]:
    """Title to its failures."""
    load_failures()
    return {title: [each for each in FAILURES.values() if each.subject == name] for name, title in SUBJECTS.items()}
