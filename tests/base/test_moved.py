"""Modules are found under the names that they had before, as the same objects."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import parallelize
from parallelize.base.moved import MOVED, new_name

ROOT = Path(parallelize.__file__).parent
DEEP = [
    "parallelize.errors",
    "parallelize.zero.reducer",
    "parallelize.checkpoint.format.boxes",
    "parallelize.applied.layout_tensor",
]


@pytest.mark.parametrize("name", DEEP)
def test_a_module_is_one_object_under_both_names(name):
    former = import_module(name)
    current = import_module(new_name(name))
    assert former is current and sys.modules[name] is current
    assert current.__spec__.name == current.__name__ == new_name(name)


def test_both_entry_functions_are_found_where_they_once_stood():
    from parallelize.apply import parallelize_module

    from parallelize.training import parallelize_model

    assert parallelize_model is parallelize.parallelize_model and parallelize_module is parallelize.parallelize_module
    import_module("parallelize.training.apply_axes")
    from parallelize.training import parallelize_model as again

    assert again is parallelize_model
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        parallelize.training.nothing  # noqa: B018


def test_the_names_of_the_table_are_gone_and_what_they_are_now_is_there():
    for old, new in MOVED.items():
        paths = [ROOT.joinpath(*name.split(".")) for name in (old, new)]
        was, is_now = (path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
        assert is_now and not was, (old, new)


def test_deep_names_of_the_documents_are_found():
    texts = [path.read_text() for path in [*ROOT.parent.glob("*.md"), *ROOT.parent.glob("docs/*.md")]]
    names = {name for text in texts for name in re.findall(r"(?:from|import|`) ?(parallelize(?:\.[a-z_]\w*)+)", text)}
    assert "parallelize.collectives" in names
    for name in names:
        owner, _, last = name.rpartition(".")
        assert hasattr(import_module(owner), last) or find_spec(name), name


def test_other_names_are_not_touched():
    assert (
        new_name("torch.errors") is None
        and new_name("parallelize.plan.resolve") is None
        and new_name("parallelize") is None
    )
