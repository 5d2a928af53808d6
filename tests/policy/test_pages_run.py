"""The Python blocks of every page run as they stand, in the order of the page, on as many ranks as its mesh has.

`"cuda"` is read as `"cpu"`, and loaders have no workers: otherwise a block is run as a reader would paste it. A block
that cannot run here says why, in a line before it that begins with `Not run by the tests:`.
"""

from __future__ import annotations

import math
import re

import pytest

from tests.policy.page_jobs import ROOT, Block, blocks_of, run_blocks, run_page

MOST_NOT_RUN = 5
MESH = re.compile(r"build_mesh\(\s*\"\w+\",\s*([^)]*)\)")
STARTED = ("docs/quick-start.md", "docs/coming-from.md")
"""Their blocks are files, which `test_documents.py` and `test_coming_from.py` start."""
NAMES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
PAGES = {name: blocks for name in NAMES if name not in STARTED and (blocks := list(blocks_of(name)))}


def num_ranks(blocks: list[Block]) -> int:
    """The ranks of a page: of its meshes, which have equally many."""
    sizes = {
        math.prod(int(size) for size in re.findall(r"=(\d+)", mesh))
        for block in blocks
        if not block.not_run
        for mesh in MESH.findall(block.code)
    }
    assert len(sizes) <= 1, f"meshes of {sorted(sizes)} ranks: one start of the page has one number of them"
    return sizes.pop() if sizes else 1


RANKS = {page: num_ranks(blocks) for page, blocks in PAGES.items()}


def pages_of(ranks: int) -> list[str]:
    return [page for page in PAGES if RANKS[page] == ranks]


@pytest.mark.parametrize("page", pages_of(1))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(0, page, str(tmp_path))


@pytest.mark.parametrize("page", pages_of(2))
def test_the_blocks_of_a_page_run_on_two_ranks(two_processes, page, tmp_path):
    two_processes.run(run_page, page, str(tmp_path))


@pytest.mark.parametrize("page", pages_of(4))
def test_the_blocks_of_a_page_run_on_four_ranks(four_processes, page, tmp_path):
    four_processes.run(run_page, page, str(tmp_path))


@pytest.mark.parametrize("page", pages_of(8))
def test_the_blocks_of_a_page_run_on_eight_ranks(eight_processes, page, tmp_path):
    eight_processes.run(run_page, page, str(tmp_path))


def test_every_page_runs_somewhere():
    assert set(RANKS.values()) <= {1, 2, 4, 8}


def test_few_blocks_are_not_run_and_each_says_why():
    reasons = [block.not_run for blocks in PAGES.values() for block in blocks if block.not_run]
    assert len(reasons) <= MOST_NOT_RUN and all(len(reason) > 10 for reason in reasons)


def test_a_block_that_is_wrong_is_noticed():
    assert run_blocks("page.md", [Block(1, "x = 1"), Block(4, "print(x, 2)")]) == ["1 2"]
    with pytest.raises(NameError, match="no_such_name"):
        run_blocks("page.md", [Block(1, "no_such_name")])
    with pytest.raises(AssertionError, match="meshes of"):
        num_ranks([Block(1, 'build_mesh("cpu", tp=2)'), Block(9, 'build_mesh("cpu", dp=2, tp=2)')])
