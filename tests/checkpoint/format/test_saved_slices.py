"""Slices of many ranks: a grid has those that were saved, finds those of a box, and is small where ranks are alike."""

from __future__ import annotations

import json
import random
from itertools import pairwise, product

import pytest

from parallelize.base.boxes import intersection
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format import saved_slices
from parallelize.checkpoint.format.header import FileInfo
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, manifest_from
from parallelize.checkpoint.format.saved_slices import Grid, arranged, key_of, overlapping_slices
from tests.matrix.cells import RIGHT, run_cell

CUTS = {
    "rows": ((64,), [range(0, 65, 2)]),
    "rows of two dims": ((40, 24), [range(0, 41, 4), (0, 6, 12, 18, 24)]),
    "a shorter last one": ((35, 3), [(*range(0, 35, 2), 35), (0, 3)]),
    "packed of other lengths": ((90,), [(0, *range(10, 31, 2), *range(31, 91))]),
    "three dims": ((6, 8, 10), [range(7), range(0, 9, 2), (0, 5, 10)]),
}


def rows_of(cuts, ranks: int = 1 << 20):
    """(file, key, box) of each slice, in the order of ranks; ranks take turns where they are fewer."""
    boxes = list(product(*(pairwise(dim) for dim in cuts)))
    rows = [(f"rank-{n % ranks}.safetensors", key_of("w", n // ranks), box) for n, box in enumerate(boxes)]
    random.Random(0).shuffle(rows)
    return rows


def manifest_of(tensors) -> Manifest:
    files = sorted({part.file for saved in tensors for part in saved.slices})
    return Manifest(0, {}, {f: FileInfo(f, 9, "0") for f in files}, {s.name: s for s in tensors}, {})


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("ranks", [1 << 20, 7])
def test_a_grid_has_the_slices_that_were_saved(name, ranks):
    shape, cuts = CUTS[name]
    rows = rows_of(cuts, ranks)
    slices = arranged(shape, rows)
    assert isinstance(slices, Grid) and slices.is_whole
    assert {(part.file, part.key, part.box) for part in slices} == set(rows)
    read = manifest_from(manifest_of([SavedTensor("w", "F32", shape, slices)]).to_bytes(), "x")
    assert read.tensors["w"].slices == slices


@pytest.mark.parametrize("name", CUTS)
def test_the_slices_of_a_box_are_found(name):
    shape, cuts = CUTS[name]
    slices, draw = arranged(shape, rows_of(cuts)), random.Random(1)
    for _ in range(300):
        box = tuple(tuple(sorted((draw.randint(0, size), draw.randint(0, size)))) for size in shape)
        expected = {part.key + part.file for part in slices if intersection(box, part.box) is not None}
        assert {part.key + part.file for part in overlapping_slices(slices, box)} == expected
        assert {part.key + part.file for part in overlapping_slices(tuple(slices), box)} == expected


def test_what_is_no_grid_stands_one_by_one():
    rows = rows_of(CUTS["rows"][1])
    assert not isinstance(arranged((64,), rows[1:]), Grid)  # one is missing
    assert not isinstance(arranged((64,), [*rows[1:], rows[1]]), Grid)  # one is there twice
    assert not isinstance(arranged((64,), [*rows[1:], (rows[0][0], "other", rows[0][2])]), Grid)  # under another name
    assert not isinstance(arranged((8,), rows_of([range(9)])), Grid)  # few
    halves = [("a", "w", ((0, 4), (0, 3))), ("b", "w", ((0, 4), (3, 9)))]
    thirds = [(f"c{n}", "w", ((4, 8), (n, n + 1))) for n in range(9)]
    assert not isinstance(arranged((8, 9), [*halves, *thirds, *rows_of([range(8, 17), (0, 9)])]), Grid)


def test_more_ranks_of_the_same_kind_need_few_more_bytes():
    def length(ranks: int) -> int:
        boxes = [f"w{n}" for n in range(50)]
        step = 4096 // ranks
        slices = {
            name: arranged((4096, 64), [(f"r{n}", name, ((n * step, (n + 1) * step), (0, 64))) for n in range(ranks)])
            for name in boxes
        }
        return len(manifest_of([SavedTensor(n, "F32", (4096, 64), s) for n, s in slices.items()]).to_bytes())

    # what grows is the list of files, each with its header's digest, and that of their numbers
    assert length(2048) - length(512) < 1536 * 40


GRIDS = {
    "one rank too few": lambda grid, groups: groups[0].pop(),
    "one rank too many": lambda grid, groups: groups[0].append(0),
    "an empty part": lambda grid, groups: grid.update(cuts=[[0, 0, *range(2, 63, 2), 64]]),
    "parts out of order": lambda grid, groups: grid.update(cuts=[[0, 4, 2, *range(6, 65, 2)]]),
    "parts that end early": lambda grid, groups: grid.update(cuts=[[*range(0, 63, 2), 63]]),
    "parts beyond the end": lambda grid, groups: grid.update(cuts=[65]),
    "parts of length 0": lambda grid, groups: grid.update(cuts=[0]),
    "no group": lambda grid, groups: grid.update(group=1),
    "a group before the first": lambda grid, groups: grid.update(group=-1),
    "a file that is none": lambda grid, groups: groups[0].__setitem__(0, 99),
    "other dims": lambda grid, groups: grid.update(cuts=[2, 2]),
    "cuts of text": lambda grid, groups: grid.update(cuts=["2"]),
    "no cuts": lambda grid, groups: grid.update(cuts=[[]]),
    "no key": lambda grid, groups: grid.pop("key"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_invalid_grids_are_refused(name):
    from parallelize.base.files.digests import digest_of

    text = manifest_of([SavedTensor("w", "F32", (64,), arranged((64,), rows_of(CUTS["rows"][1])))]).to_bytes()
    body = text.split(b"\n", 1)[1][:-2]
    fields = json.loads(body)
    GRIDS[name](fields["tensors"]["w"][2], fields["groups"])
    damaged = json.dumps(fields).encode()
    framed = b'{"digest":"' + digest_of(damaged).encode() + b'","manifest":\n' + damaged + b"}\n"
    with pytest.raises(CheckpointError) as error:
        manifest_from(framed, "x")
    assert error.value.slugs[0] in ("not-covered", "bad-manifest")


@pytest.mark.parametrize(
    "cell", [("llama", "dp-tp-zero1"), ("gpt2", "dp-zero3"), ("mixture", "ep-pp-dp")], ids="-".join
)
def test_a_run_goes_on_elsewhere_from_grids(cell, monkeypatch):
    """As of many ranks: two slices are a grid here."""
    found = []
    overlapping = Grid.overlapping
    monkeypatch.setattr(saved_slices, "FEW", 1)
    monkeypatch.setattr(Grid, "overlapping", lambda grid, box: found.append(grid) or overlapping(grid, box))
    verdict = run_cell("resume_adamw_elsewhere", *cell)
    assert verdict.word == RIGHT, verdict.trace
    assert len({grid.key for grid in found}) > 10
