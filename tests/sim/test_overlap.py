"""Planned models whose collectives run beside their products equal the unsharded model, and say that they did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from parallelize import overlap_counts
from tests.sim.test_planned_equals_unsharded import MODE_IDS, MODES, prepared
from tests.support.models import FAMILIES
from tests.support.parity import compare, planned_run
from tests.support.threads import run_ranks


def check(family: str, tp: int, mode: tuple[bool, bool], overlap: str, dtype: torch.dtype, **overrides: Any) -> list:
    model, want, data = prepared(family, dtype, tuple(sorted(overrides.items())))
    models = [copy.deepcopy(model) for _ in range(tp)]
    options = {"sequence_parallel": mode[0], "loss_parallel": mode[1], "overlap": overlap}

    def body(rank: int) -> dict:
        compare(planned_run(models[rank], tp, data, **options), want, dtype)
        return overlap_counts(models[rank])

    return run_ranks(tp, body)


@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=[MODE_IDS[0], MODE_IDS[3]])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked(family, tp, mode):
    counts = check(family, tp, mode, "chunked", torch.float64)
    assert counts[0] and all(calls == fused > 0 for calls, fused in counts[0].values())
