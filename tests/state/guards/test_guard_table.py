"""The table of guards: every row says which error it raises and when it is set up, and is set up then."""

from __future__ import annotations

import re

import pytest
from torch import nn

from parallelize.adapters import adapter_guards
from parallelize.axes.tensor.torch_styles import tensor_guards
from parallelize.axes.zero import data_guards
from parallelize.state.guards import guard_table
from parallelize.state.guards.guard_table import GIVEN, GUARDS, MOMENTS, PLANNED, Guard, Guarded, set_up
from parallelize.training import loop_guards
from tests.policy.sources import PATHS

TABLES = (adapter_guards, tensor_guards, data_guards, loop_guards)  # each has added its rows


def test_every_row_has_an_error_a_moment_and_words_of_its_own():
    assert len(GUARDS) > 20
    sources = " ".join(path.read_text() for path in PATHS.values())
    for guard in GUARDS:
        assert guard.moments and set(guard.moments) <= set(MOMENTS)
        assert guard.slugs and all(f'"{slug}"' in sources for slug in guard.slugs), guard
    assert len({guard.refuses for guard in GUARDS}) == len(GUARDS)


def test_every_moment_is_set_up_in_the_code_and_has_guards():
    sources = " ".join(path.read_text() for path in PATHS.values())
    names = {name: value for name, value in vars(guard_table).items() if name.isupper() and value in MOMENTS}
    assert set(names.values()) == set(MOMENTS)
    for name, moment in names.items():
        assert re.search(rf"set_up\({name}, ", sources), name
        assert any(moment in guard.moments for guard in GUARDS), name


def test_guards_are_set_up_at_their_moments_where_they_apply(monkeypatch):
    seen: list[str] = []
    rows = [
        Guard(("a",), "a", (PLANNED,), lambda model: seen.append("a")),
        Guard(
            ("b",), "b", (GIVEN, PLANNED), lambda model: seen.append("b"), applies=lambda model: model.mesh is not None
        ),
    ]
    monkeypatch.setattr(guard_table, "GUARDS", [])
    guard_table.add_guards(*rows)
    model = Guarded(nn.Linear(2, 2))
    set_up(PLANNED, model)
    assert seen == ["a"]
    set_up(GIVEN, Guarded(model.module, mesh="a mesh"))
    assert seen == ["a", "b"]


@pytest.mark.parametrize("slug", ["early-optimizer", "other-data-parallel", "offloaded-parameters"])
def test_what_is_refused_before_a_plan_is_refused_before_data_axes_too(slug):
    """Both have one row: the door of a model does not matter."""
    rows = [guard for guard in GUARDS if slug in guard.slugs and guard_table.RESOLVED in guard.moments]
    assert len(rows) == 1 and rows[0].applies(Guarded(nn.Linear(2, 2)))
