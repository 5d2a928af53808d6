"""Random mixtures of experts on random meshes with random options: three steps equal those of the unsharded model, or
are refused by name.

Each case is a seed: `draw(seed)` says what it does. More of them, or one that has failed:

    PARALLELIZE_MIXTURES=1000-1200 python -m pytest -m sweep tests/training/test_random_mixtures.py
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch

from parallelize.base.errors import ParallelizeError
from parallelize.base.mesh import MeshSpec, possible_expert_ranks
from parallelize.plan.stage_ranks import SCHEDULES
from tests.support.models import COMMON, MIXTURES, tiny_model
from tests.training.folded_experts import check

FIRST, _, LAST = os.environ.get("PARALLELIZE_MIXTURES", "0-19").partition("-")
MESHES: tuple[dict[str, int], ...] = (
    {"dp": 2},
    {"dp": 4},
    {"tp": 2},
    {"tp": 4},
    {"cp": 2},
    {"pp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "cp": 2},
    {"dp_replicate": 2, "dp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
)
SHARED_ENDS = ("lfm2_moe", "gemma4_text", "jetmoe", "ernie4_5_moe")
"""Families whose embedding and head are one weight unless they are told otherwise."""


@dataclass(frozen=True)
class Mixture:
    """A model, a mesh, and options of `parallelize_model`."""

    family: str
    overrides: dict[str, Any]
    axes: dict[str, int]
    options: dict[str, Any]

    def model(self) -> torch.nn.Module:
        model = tiny_model(self.family, torch.float64, **self.overrides)
        return model.eval() if self.family == "phimoe" else model  # in training its router draws


def draw(seed: int) -> Mixture:
    """A mixture from a seed; most of them are such as are served."""
    chance = random.Random(seed)
    axes = dict(chance.choice(MESHES))
    options: dict[str, Any] = {"recompute": chance.choice(("off", "off", "selective", "full"))}
    options |= _experts(chance, axes) | _data_options(chance, axes) | _stages(chance, axes)
    if axes.get("tp", 1) > 1:
        options |= {"sequence_parallel": chance.random() < 0.6, "loss_parallel": chance.random() < 0.5}
    elif chance.random() < 0.25:
        options["fuse_loss"] = True
    if axes.get("cp", 1) > 1 and chance.random() < 0.3:
        options["ulysses"] = 2
    if chance.random() < 0.4:
        options["overlap"] = "chunked"
    if "pp" not in axes and options.get("zero") != 3 and chance.random() < 0.3:
        options |= {"overlap_microbatches": True, "recompute": "off", "num_microbatches": chance.choice((2, 3))}
    family = chance.choice(sorted(MIXTURES))
    overrides = {"tie_word_embeddings": False} if family in SHARED_ENDS else {}
    if "pp" in axes and SCHEDULES[options["schedule"]].stages_per_rank > 1:
        overrides |= _with_layers(family, 2 * SCHEDULES[options["schedule"]].stages_per_rank)
    return Mixture(family, overrides, axes, options)


def _experts(chance: random.Random, axes: dict[str, int]) -> dict[str, Any]:
    """ep and etp: a divisor of what the mesh allows, split in two."""
    ranks = chance.choice(possible_expert_ranks(MeshSpec(**axes)))
    etp = chance.choice([n for n in (1, 1, 2) if ranks % n == 0])
    return {"ep": ranks // etp, "etp": etp} if ranks > 1 else {}


def _data_options(chance: random.Random, axes: dict[str, int]) -> dict[str, Any]:
    zero = chance.choice((0, 1, 2, 3)) if "dp" in axes else 0
    return {"zero": zero, **({"defer": chance.random() < 0.5} if zero >= 2 else {})}


def _stages(chance: random.Random, axes: dict[str, int]) -> dict[str, Any]:
    if "pp" not in axes:
        return {"num_microbatches": chance.choice((1, 1, 2))}
    schedule = chance.choice(sorted(SCHEDULES))
    return {"schedule": schedule, "num_microbatches": 4 if "dualpipe" in schedule else chance.choice((2, 4))}


def _with_layers(family: str, count: int) -> dict[str, Any]:
    """Fields of a config with more layers: also those that list a value for each of them."""
    sizes = {**COMMON, **MIXTURES[family][2]}
    lists = {
        key: value
        for key, value in sizes.items()
        if isinstance(value, list) and len(value) == sizes["num_hidden_layers"]
    }
    return {
        "num_hidden_layers": count,
        **{key: (value * count)[:count] for key, value in lists.items() if key.startswith("layer")},
    }


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_a_random_mixture_is_right_or_refused(seed):
    mixture = draw(seed)
    try:
        check(
            mixture.model(),
            mixture.axes,
            mixture.options,
            per_rank=1 if prod(mixture.axes.values()) > 4 else 2,
            length=8,
        )
    except ParallelizeError as error:
        assert "stage-failed" not in error.slugs and "ranks-timed-out" not in error.slugs, f"{mixture}\n{error}"
