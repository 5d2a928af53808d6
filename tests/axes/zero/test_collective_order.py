"""ZeRO 3 where data ranks run different units: refused by name, before a rank's shard is taken for one of another
unit."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import HandshakeError, build_mesh, parallelize_model, shard_data
from parallelize.axes.zero.collective_order import UnitOrder
from tests.axes.zero import zero_jobs as jobs
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

WIDTH = 6


class Skipping(nn.Module):
    """Layers of one size, of which a call may skip some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = x if n in skipped else torch.tanh(layer(x))
        return self.head(x)


def skipping() -> Skipping:
    torch.manual_seed(0)
    return Skipping().double()


def test_layers_that_all_ranks_skip():
    """Each step skips others, and evaluations in between run all."""
    unsharded = skipping()
    models = [copy.deepcopy(unsharded) for _ in range(2)]
    steps = [set(), {1}, {1, 3}, set(), {0}, {3}, set()]
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    for skipped in steps:
        (2 * unsharded(x, skipped).sum()).backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters()}

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 3, units=["layers.*"])
        for skipped in steps:
            model(x, skipped).sum().backward()
            with torch.no_grad():
                model(x, set())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


@pytest.mark.parametrize("first", [0, 3], ids=["at once", "after steps"])
def test_layers_that_differ_on_both_ranks(first):
    models = [skipping() for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 3, units=["layers.*"])
        x = torch.randn(2, WIDTH, dtype=torch.float64)
        for _ in range(first):
            model(x, set()).sum().backward()
        with pytest.raises(HandshakeError, match=r"units-diverge(.|\n)*layers\.2(.|\n)*fix"):
            model(x, {1, 1 + rank}).sum().backward()

    run_ranks(2, body)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_loop_that_repeats_itself_meets_no_more(axes):
    """Training steps of four microbatches, with an evaluation after each."""
    meetings: list[int] = [0]
    meet = UnitOrder._meet

    def counting(self: UnitOrder, *args: Any) -> None:
        meetings[0] += 1
        meet(self, *args)

    models = [tiny_model("llama", torch.float64, num_hidden_layers=4) for _ in range(math.prod(axes.values()))]

    def body(rank: int) -> list[int]:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), zero=3, num_microbatches=4)
        ids, labels = tiny_batch(batch=4, length=5)
        counts = []
        for _ in range(4):
            parallel.step(ids, targets=labels)
            parallel.evaluate(ids, targets=labels)
            dist.barrier()
            counts.append(meetings[0])
            dist.barrier()
        return counts

    with mock.patch.object(UnitOrder, "_meet", counting):
        first, *_, before_last, last = run_ranks(len(models), body)[0]
    assert first > 0 and last == before_last


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.variants(every=2)
@pytest.mark.on_cpus("its mesh is one of gloo")
@pytest.mark.parametrize("skipped", [1, 3], ids=["in the middle", "the last"])
def test_a_layer_that_one_rank_skips(two_processes, skipped):
    """The other rank is in a collective, and learns of it when that fails."""
    messages = two_processes.run(jobs.skipped_unit, skipped)
    # DTensor takes equal meshes for one, so later jobs' tensors could be gathered over the group that failed
    two_processes.close()
    for message in messages:
        assert "units-diverge" in message and "rank 1 left the order" in message and f"layers.{skipped}" in message
