"""Random combinations of models, meshes, options and habits of training are right, or refused by name.

Each case is a seed: `combinations.draw(seed)` says what it does. More of them, or one that has failed:

    PARALLELIZE_SEEDS=1000-1400 make sweep        PARALLELIZE_SEEDS=657 python -m pytest -m sweep tests/training -k seeded
"""  # noqa: E501

from __future__ import annotations

import os

import pytest

from tests.training.combination_runs import run_combination
from tests.training.combinations import draw

pytestmark = pytest.mark.processes
FIRST, _, LAST = os.environ.get("PARALLELIZE_SEEDS", "200-259").partition("-")

FOUND = {
    "state of an optimizer that is cleared": dict(
        axes={"tp": 2}, optimizer="momentum", habits=((1, "reset optimizer", ""),)
    ),
    "deferred reduction of ZeRO 3 by hand": dict(axes={"dp": 2}, options={"zero": 3, "defer": True}, microbatches=2),
    "full tensors loaded under ZeRO 3": dict(axes={"dp": 2}, options={"zero": 3}, habits=((0, "load weights", ""),)),
    "functional dropout of a recomputed layer": dict(
        family="opt", overrides={"dropout": 0.1, "num_hidden_layers": 2}, axes={"tp": 2}, options={"recompute": "full"}
    ),
    "checkpointing of transformers in a split backward": dict(
        family="phi3",
        overrides={"resid_pdrop": 0.2, "num_hidden_layers": 5},
        axes={"pp": 2},
        options={"schedule": "interleaved_zero_bubble", "stages_per_rank": 2, "num_microbatches": 2},
        loop="step",
        loss="targets",
        microbatches=2,
        habits=((0, "checkpointing by transformers", ""),),
    ),
    "recomputed dropout before deferred logits": dict(
        family="phi3",
        overrides={"resid_pdrop": 0.2, "num_hidden_layers": 2},
        axes={"pp": 2},
        options={"fuse_loss": True, "num_microbatches": 2},
        loop="step",
        loss="targets",
        microbatches=2,
        habits=((0, "checkpointing by transformers", ""),),
    ),
}
"""What such combinations have found, reduced."""

PLAIN = dict(
    family="llama",
    overrides={"num_hidden_layers": 2},
    options={},
    weights="float64",
    loop="manual",
    loss="cross_entropy",
    optimizer="sgd",
    inputs="ids",
    rows=2,
    length=7,
    microbatches=1,
    clip=0.0,
    ignored=False,
    habits=(),
    generates=False,
)


def outcome_of(pools: dict, size: int, seed: int, folder: object, changes: dict | None = None) -> list:
    pool = pools[size]
    outcomes = pool.run(run_combination, seed, str(folder), changes)
    if any(kind != "right" for kind, _ in outcomes):
        pool.close()  # ranks that stopped at different places
    return outcomes


@pytest.mark.parametrize("name", FOUND)
def test_reduced_combinations_are_right(two_processes, tmp_path, name):
    changes = {**PLAIN, **FOUND[name]}
    outcomes = outcome_of({2: two_processes}, 2, 1, tmp_path, changes)
    assert all(kind == "right" for kind, _ in outcomes), outcomes


def test_gradient_hooks_under_fully_shard_are_refused(two_processes, tmp_path):
    changes = {**PLAIN, "axes": {"dp": 2}, "options": {"zero": 3}, "habits": ((0, "gradient hook", "mlp"),)}
    for kind, value in outcome_of({2: two_processes}, 2, 1, tmp_path, changes):
        assert kind == "refused" and value[0] == ("hook-not-run",), value


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_seeded_combinations_are_right_or_refused(two_processes, four_processes, tmp_path, seed):
    case = draw(seed)
    outcomes = outcome_of({2: two_processes, 4: four_processes}, case.size, seed, tmp_path)
    kinds = {kind for kind, _ in outcomes}
    assert len(kinds) == 1 and kinds <= {"right", "refused", "impossible"}, f"{case}\n{outcomes}"
