"""Mistakes around `verify`, each by its slug."""

from __future__ import annotations

from multiprocessing import Pipe
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from parallelize import HandshakeError, ModelError, verify
from parallelize.tools.verification.processes import _Answers
from parallelize.tools.verification.verify import default_backend
from tests.support.refused import RULES, WIDTH, Block, refused


def block() -> dict[str, Any]:
    def inputs(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        hidden = torch.randn(batch, sequence, WIDTH)
        return {"hidden": hidden, "targets": torch.randint(0, WIDTH, (batch, sequence))}

    return {"model": Block(), "inputs": inputs}


@pytest.mark.parametrize("backend", ["thread", "nccl", ""])
def test_a_backend_that_does_not_exist(backend):
    with refused(ModelError, "bad-backend", repr(backend), "threads"):
        verify(block, RULES, "tp=2", backend=backend)


class Broken(ParallelStyle):
    """A style of a user that raises an error of its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise AttributeError("no such attribute")


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_style_that_fails_while_it_is_applied(one_process):
    with refused(ModelError, "cannot-apply", "AttributeError: no such attribute", "test_refusals.py"):
        verify(block, {"up": Broken()}, "tp=1", backend="torchrun")


class Ended:
    """A process that was killed."""

    exitcode = -9

    def join(self, timeout: float) -> None:
        pass


def test_a_process_that_ended_without_an_answer():
    parent_end, child_end = Pipe()
    child_end.close()
    with refused(HandshakeError, "ranks-lost", "rank 0 ended with exit code -9", "--backend threads"):
        _Answers([(Ended(), parent_end)], 5.0, lambda text: None).result()


def test_a_process_that_sent_why_it_ended():
    pipes = [Pipe() for _ in range(2)]
    pipes[0][1].send(("ok", None))
    pipes[1][1].send(("lost", "rank 1: MemoryError: no memory"))
    with refused(HandshakeError, "ranks-lost", "rank 1", "no memory"):
        _Answers([(Ended(), parent_end) for parent_end, _ in pipes], 5.0, lambda text: None).result()


@pytest.mark.parametrize(
    ("version", "backend"),
    [("2.11.0+cpu", "gloo"), ("2.12.1", "threads"), ("2.13.0+cu128", "threads"), ("3.0.0.dev1", "threads")],
)
def test_the_default_backend_is_one_that_this_torch_can_run(version, backend):
    assert default_backend(version) == backend
