"""Models by name, by config and by function."""

from __future__ import annotations

import pytest

from parallelize.errors import ModelError
from parallelize.models.model_source import parse_overrides, read_model


def test_overrides():
    assert parse_overrides(["a=2", "b=relu", "c=[1, 2]", "d=true"]) == {"a": 2, "b": "relu", "c": [1, 2], "d": True}
    with pytest.raises(ModelError):
        parse_overrides(["a"])
    with pytest.raises(ModelError) as caught:
        read_model("llama", {"num_hiden_layers": 2})
    assert "num_hidden_layers" in str(caught.value)
