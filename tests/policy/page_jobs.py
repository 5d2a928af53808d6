"""The Python blocks of a page, as ranks run them."""

from __future__ import annotations

import linecache
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from tests.training.trainers.trainer_jobs import launched

ROOT = Path(__file__).parents[2]
NOT_RUN = "Not run by the tests:"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORKERS = re.compile(r"num_workers=\d+")  # a rank of the tests may start no processes


class Block(NamedTuple):
    """One block: the line of the page at which it begins, and why it is not run, or nothing."""

    line: int
    code: str
    not_run: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in _BLOCK.finditer(text):
        before = text[: match.start()].rstrip().splitlines()
        reason = before[-1].partition(NOT_RUN)[2].strip() if before else ""
        yield Block(text[: match.start()].count("\n") + 2, match.group(1), reason)


def run_page(rank: int, page: str, folder: str) -> list[str]:
    """Run the blocks of a page one after the other, with the same names. Returns the lines that they print."""
    os.chdir(folder)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    blocks = [block for block in blocks_of(page) if not block.not_run]
    if "Trainer" not in "".join(block.code for block in blocks):
        return run_blocks(page, blocks)
    with launched():  # accelerate counts processes by what torchrun tells them
        return run_blocks(page, blocks)


def run_blocks(page: str, blocks: list[Block]) -> list[str]:
    printed: list[str] = []
    names: dict[str, Any] = {"__name__": "page"}
    names["print"] = lambda *values, **_: printed.append(" ".join(map(str, values)))
    for block in blocks:
        source = _WORKERS.sub("num_workers=0", block.code.replace('"cuda"', '"cpu"'))
        file = f"<{page}, line {block.line}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for code that reads its source
        try:
            exec(compile(source, file, "exec"), names)
        except SystemExit as end:
            assert not end.code, f"{file} ends with status {end.code}"
    return printed
