"""What tests of errors share: small models, a mesh without processes, and a check of the problem that was raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import MeshSpec, ParallelizeError
from parallelize.base.terminal.console import MISTAKE
from parallelize.cli import main
from parallelize.tools.analysis.record.shapes import fake_mesh

WIDTH = 8
RULES = {"up": "colwise", "down": "rowwise"}


class Block(nn.Module):
    """A column linear and a row linear: `RULES` is its plan."""

    def __init__(self, width: int = WIDTH, inner: int = 12):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).relu())


def small_mesh(**sizes: int) -> AbstractContextManager[DeviceMesh]:
    """A mesh in this process, which is its rank 0; nothing is sent."""
    return fake_mesh(MeshSpec(**sizes))


@contextmanager
def refused(kind: type[ParallelizeError], slug: str, *named: str) -> Iterator[None]:
    """The block must raise `kind` with a problem of this slug, whose text has every one of `named`."""
    with pytest.raises(kind) as caught:
        yield
    problems = [problem for problem in caught.value.problems if problem.slug == slug]
    assert problems, f"{slug} is not among {caught.value.slugs}"
    text = str(problems[0])
    assert all(name in text for name in named), text


def refused_command(capsys: pytest.CaptureFixture, *arguments: object, status: int = MISTAKE) -> tuple[list[str], str]:
    """Runs a command that must fail with `status`; returns its slugs, and its JSON output as one text."""
    assert main([*map(str, arguments), "--json"]) == status
    problems = json.loads(capsys.readouterr().out)["error"]
    return [problem["slug"] for problem in problems], json.dumps(problems, ensure_ascii=False)
