"""The answer of the toolkit to a rebuilt failure."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from typing import Any

from tests.known_failures.failure import Failure, Place, load_failures
from tests.matrix.cells import Records, Verdict, judge, run_side
from tests.matrix.feature import Feature
from tests.matrix.sides import Alone, Planned
from tests.support.threads import run_ranks


def verdict_of(failure: Failure, pool: Any = None) -> Verdict:
    """Whether the loop is right on the ranks of its place, or by which slug it is refused. pool: of ranks that are
    processes."""
    place = failure.place
    assert place is not None
    feature = Feature(failure.name, failure.run, bound=place.bound, refused={failure.answer: ""})
    models = place.models()
    ranks, error = _on_processes(failure, pool) if place.processes else _on_ranks(feature, place, models)
    expected = {} if error is not None else _alone(feature, place, models)
    return judge(feature, place.kind, ranks, error, expected, {})


def _alone(feature: Feature, place: Place, models: list) -> Records:
    if place.one_rank:
        ranks, error = _on_ranks(feature, replace(place, sizes={"dp": 1}, options={}), models)
        if error is not None:
            raise error
        return ranks[0]
    own = copy.deepcopy(models)
    with tempfile.TemporaryDirectory(prefix="failure-") as folder:
        return run_side(feature, Alone(place.kind, own[0], folder, tuple(own[1:])))


def _on_ranks(feature: Feature, place: Place, models: list) -> tuple[list[Records], BaseException | None]:
    with tempfile.TemporaryDirectory(prefix="failure-") as folder:

        def body(rank: int) -> Records:
            own = copy.deepcopy(models)
            return run_side(feature, Planned(place.kind, own[0], folder, place.axis, tuple(own[1:])))

        try:
            return run_ranks(place.axis.world_size, body), None
        except Exception as error:
            return [], error


def _on_processes(failure: Failure, pool: Any) -> tuple[list[Records], BaseException | None]:
    with tempfile.TemporaryDirectory(prefix="failure-") as folder:
        outcomes = pool.outcomes(_rank_of_process, failure.name, folder)
    errors = [value for kind, value in outcomes if kind != "ok"]
    return ([], AssertionError(errors[0])) if errors else ([records for _, records in outcomes], None)


def _rank_of_process(rank: int, name: str, folder: str) -> Records | str:
    failure = load_failures()[name]
    place = failure.place
    assert place is not None
    own = place.models()
    return run_side(Feature(name, failure.run), Planned(place.kind, own[0], folder, place.axis, tuple(own[1:])))
