"""The text of errors."""

from __future__ import annotations

import pickle

from parallelize.base.errors import ModelError, Problem


def of_layer(number: int, value: float = 0.5) -> Problem:
    return Problem(
        "slug", f"model.layers.{number}.mlp: {value} is wrong", rows=(("module", f"layers.{number}"),), fix="fix"
    )


def test_problems_of_all_layers_are_shown_once_and_counted():
    error = ModelError(*map(of_layer, range(3)), Problem("other", "what"), of_layer(9))
    assert str(error).splitlines() == [
        "slug: model.layers.0.mlp: 0.5 is wrong (and 3 more, in other layers)",
        "  module  layers.0",
        "  fix     fix",
        "other: what",
    ]
    assert len(error.problems) == 5 and pickle.loads(pickle.dumps(error)).problems == error.problems


def test_problems_with_other_numbers_are_all_shown():
    assert str(ModelError(of_layer(0), of_layer(0, 0.7))).count("slug") == 2


def test_texts_do_not_control_the_terminal():
    assert str(Problem("slug", "a\x1b[31m\x9b\r\u2066b\tc\nd")) == "slug: a\\x1b[31m\\x9b\\r\\u2066b\tc\nd"
    assert str(Problem("slug", "\u00e4 \u4e2d \U0001f600")) == "slug: \u00e4 \u4e2d \U0001f600"
