"""Generation over `cp` on real processes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from parallelize import build_mesh, parallelize_module
from tests.axes.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, seeded, stock


def tokens_differ(rank: int, name: str, sizes: dict[str, int], options: dict[str, Any]) -> list[str]:
    """In which ways the tokens are not the unsharded model's; the ranks are seeded differently."""
    model = lively_model(name)
    planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", **sizes), **options)
    wrong = []
    for way, run in {
        "greedy": lambda net, seed: stock(net, name),
        "static cache": lambda net, seed: stock(net, name, cache_implementation="static"),
        "beams": lambda net, seed: stock(net, name, num_beams=2),
        "sampled": lambda net, seed: seeded(seed, net, name),
        "ours, sampled": lambda net, seed: ours(net, name, seed=5, **SAMPLED),
    }.items():
        expected, actual = run(model, 100), run(planned, 100 + rank)
        wrong += [] if torch.equal(expected, actual) else [way]
    return wrong
