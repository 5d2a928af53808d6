"""A run on a mesh takes the samples of the stock Trainer on one process, in its order: an old and a new log agree."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.training.trainers import order_jobs as jobs

pytest.importorskip("accelerate")
pytestmark = pytest.mark.on_cpus("the Trainer of its jobs is told to use the CPU")

DP, PP = {"dp": 2}, {"pp": 2}
TIMEOUT_S = 100
SHUFFLED = dict(train_sampling_strategy="random", max_steps=12)  # epochs of 5 or 6 steps of 8 samples
SPLIT = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
swept = partial(pytest.param, marks=pytest.mark.sweep)


def batches_of(outcomes):
    """The batches of all data ranks, joined."""
    return [[*itertools.chain(*parts)] for parts in zip(*(outcome["batches"] for outcome in outcomes), strict=True)]


def assert_same(outcomes, expected):
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "last eval_loss"):
        assert outcomes[0][name] == pytest.approx(expected[name], rel=1e-6), name


def assert_same_batches(actual, expected):
    """A loop may take a batch more than it trains on."""
    steps = min(len(actual), len(expected))
    assert steps >= 12 and actual[:steps] == expected[:steps]


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        pytest.param(40, SHUFFLED, id="several epochs"),
        pytest.param(44, SHUFFLED | SPLIT | {"dataloader_drop_last": True}, id="accumulation, a smaller last step"),
        pytest.param(44, SHUFFLED | {"train_sampling_strategy": "group_by_length"}, id="by length"),
        swept(44, SHUFFLED, id="a smaller last batch"),
        swept(45, SHUFFLED | {"dataloader_drop_last": True}, id="the last batch dropped"),
        swept(40, SHUFFLED | SPLIT, id="accumulation"),
        swept(40, SHUFFLED | {"data_seed": 11}, id="a seed of the data"),
        swept(44, SHUFFLED | SPLIT | {"train_sampling_strategy": "group_by_length"}, id="by length, accumulation"),
        swept(40, SHUFFLED | {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}, id="workers"),
    ],
)
def test_samples_and_losses_are_those_of_the_stock_trainer(two_processes, tmp_path, count, settings):
    expected = jobs.drawn(0, str(tmp_path / "one"), None, {}, count, **settings)
    run = partial(jobs.drawn, **settings)
    outcomes = two_processes.run(run, str(tmp_path / "two"), DP, {"zero": 1}, count, timeout_s=TIMEOUT_S)
    assert_same(outcomes, expected)
    if "dataloader_num_workers" not in settings:  # whose batches are drawn in another process
        assert_same_batches(batches_of(outcomes), expected["batches"])


@pytest.mark.sweep
def test_stages_take_the_samples_of_the_stock_trainer(two_processes, tmp_path):
    settings = SHUFFLED | SPLIT | {"dataloader_drop_last": True}
    expected = jobs.drawn(0, str(tmp_path / "one"), None, {}, 44, **settings)
    run = partial(jobs.drawn, **settings)
    outcomes = two_processes.run(run, str(tmp_path / "two"), PP, {"num_microbatches": 2}, 44, timeout_s=TIMEOUT_S)
    assert_same(outcomes, expected)


@pytest.mark.parametrize("sampling", ["random", pytest.param("group_by_length", marks=pytest.mark.sweep)])
def test_a_resumed_run_goes_on_as_the_stock_trainer_without_interruption(two_processes, tmp_path, sampling):
    settings = SHUFFLED | {"train_sampling_strategy": sampling}
    expected = jobs.drawn(0, str(tmp_path / "one"), None, {}, 40, **settings)
    saving = settings | {"save_strategy": "steps", "save_steps": 7}
    for changes in ({"stop_after": 7}, {"resume": True}):
        run = partial(jobs.drawn, **saving, **changes)
        outcomes = two_processes.run(run, str(tmp_path / "two"), DP, {"zero": 1}, 40, timeout_s=TIMEOUT_S)
    assert len(outcomes[0]["loss"]) == 12
    assert_same(outcomes, expected)
