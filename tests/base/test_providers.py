"""What lower rooms ask of higher ones is found by its name, and imported when it is asked for."""

from __future__ import annotations

import pytest

from parallelize.base.providers import _HOMES, provider


@pytest.mark.parametrize("name", sorted(_HOMES))
def test_what_is_provided_is_there(name):
    assert provider(name).__name__ == _HOMES[name]


def test_what_nothing_provides_is_an_error():
    with pytest.raises(KeyError):
        provider("nothing")
