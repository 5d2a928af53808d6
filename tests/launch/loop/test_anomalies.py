"""NaN and spikes: judged by a window that is saved, and their source named by module and rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from parallelize.launch.config.run_config import AnomalySection
from parallelize.launch.loop.anomalies import AnomalyWatch, largest_gradient, source_of_nonfinite


def watch(**section) -> AnomalyWatch:
    watched = AnomalyWatch(AnomalySection(window=5, spike_factor=4.0, **section))
    for step, loss in enumerate([3.0, 2.9, 3.1, 3.0, 2.9]):
        assert watched.judge(step, loss, 1.0) is None
    return watched


def test_losses_far_above_the_window_are_spikes():
    watched = watch(spike="skip")
    assert watched.judge(5, 3.2, 1.0) is None
    spike = watched.judge(6, 9.0, 1.0)
    assert (spike.kind, spike.action) == ("spike", "skip") and "9, after 3.02" in spike.what
    assert watched.judge(7, 9.0, 1.0) is not None  # a skipped loss is not in the window
    assert watch(spike="ignore").judge(5, 9.0, 1.0) is None
    warned = watch(spike="warn")
    assert [bool(warned.judge(step, 9.0, 1.0)) for step in range(5, 9)] == [True, False, False, False]  # a new level


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_one(loss, norm):
    anomaly = watch(nonfinite="rewind").judge(5, loss, norm)
    assert (anomaly.kind, anomaly.action) == ("nonfinite", "rewind")


def test_the_window_is_saved_and_the_count_stays_after_going_back():
    watched = watch(most=2)
    state = watched.state_dict()
    other = AnomalyWatch(watched.section)
    other.load_state_dict(state)
    assert other.judge(5, 9.0, 1.0) is not None and not other.too_many
    other.load_state_dict(state)
    assert other.judge(6, 9.0, 1.0) is not None and other.too_many


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, input_ids):
        return self.head(self.middle(self.embed(input_ids)))


def poisoned(rank: int, where: str) -> list[str]:
    """What is said of a NaN on rank 1."""
    torch.manual_seed(0)
    parallel = parallelize_model(Model(), build_mesh("cpu", dp=2), check_replicated=False)
    batch = {"input_ids": torch.tensor([[1, 2], [3, rank]]), "targets": torch.tensor([[2, 3], [4, 5]])}
    parallel.step(**batch)
    said = [largest_gradient(parallel)]
    if rank == 1 and where == "output":
        parallel.module.middle.register_forward_hook(lambda module, args, output: output * math.nan)
    if rank == 1 and where == "weight":
        parallel.module.head.weight.data[0, 0] = math.nan
    if rank == 1 and where == "gradient":
        parallel.module.middle.weight.grad[0, 0] = math.nan
    return [*said, source_of_nonfinite(parallel, batch)]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("output", "the output of middle on rank 1 is the first"),
        ("weight", "parameters are not finite: head.weight on rank 1"),
        ("gradient", "gradients that are not: middle.weight on rank 1"),
    ],
)
def test_the_source_is_named_by_module_and_rank(two_processes, where, named):
    said = two_processes.run(poisoned, where)
    assert said[0] == said[1] and named in said[0][1]
    assert said[0][0].startswith("the largest gradient is that of head.") and " on rank " in said[0][0]
