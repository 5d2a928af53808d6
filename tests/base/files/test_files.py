"""Files that are not trusted: names, sizes and JSON are checked. Boxes of tensors agree with indexing."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from parallelize.base.boxes import intersection, overlapping, slices_of, volume
from parallelize.base.errors import CheckpointError
from parallelize.base.files.paths import check_name, read_named, read_small
from parallelize.base.files.strict_json import read_json, write_json

pytestmark = pytest.mark.torch_free


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[NaN]", b"[1e999999", b'"\\ud800"', b"[" * 100_000, b"\xff"])
def test_json_that_two_readers_would_read_differently_is_refused(text):
    with pytest.raises(CheckpointError, match="bad-json"):
        read_json(text, "a file")


def test_json_comes_back():
    value = {"b": [1, 2.5, None, "é"], "a": {}}
    assert read_json(write_json(value), "a file") == value and list(read_json(write_json(value), "a file")) == [
        "b",
        "a",
    ]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "a\0", "a:b", "a\nb", 3, "x" * 256])
def test_names_that_leave_their_folder_are_refused(name):
    with pytest.raises(CheckpointError, match="unsafe-path"):
        check_name(name, "here")


def test_links_pipes_large_and_binary_files_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "nul").write_bytes(b"a\0b")
    os.mkfifo(folder / "pipe")
    for name, slug in (("link", "unsafe-path"), ("nul", "bad-text"), ("gone", "missing-file")):
        with pytest.raises(CheckpointError, match=slug):
            read_small(folder, name)
    with pytest.raises(CheckpointError, match="unsafe-path"):
        read_named(folder / "pipe", 10)
    with pytest.raises(CheckpointError, match="oversized-file"):
        read_named(folder / "nul", 2)


def test_boxes_agree_with_indexing():
    shape, intervals = (3, 4), [(0, 2), (1, 3), (2, 3), (0, 1)]
    boxes = list(itertools.product(intervals, repeat=2))
    cells = {box: frozenset(np.arange(12).reshape(shape)[slices_of(box)].ravel().tolist()) for box in boxes}
    for a, b in itertools.product(boxes, repeat=2):
        both = intersection(a, b)
        assert (
            cells[both]
            if both in cells
            else both is not None and frozenset(np.arange(12).reshape(shape)[slices_of(both)].ravel().tolist())
        ) == (cells[a] & cells[b] or False)
        assert volume(a) == len(cells[a])
        assert (overlapping([a, b]) is not None) == bool(cells[a] & cells[b])
