"""An error of one rank keeps its text where the ranks cannot reach each other after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize import PipelineError, build_mesh, next_tokens, parallelize_model
from parallelize.axes.pipeline import failure
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


def test_an_error_is_raised_although_the_ranks_lost_each_other(monkeypatch):
    """As under ZeRO 3 over tp, where the other data ranks wait for a gather until the group's timeout."""
    models = [tiny_model("llama", num_hidden_layers=1) for _ in range(2)]

    def lost(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting 20000ms for recv operation to complete")

    monkeypatch.setattr(
        failure, "dist", SimpleNamespace(**{**vars(dist), "all_reduce": lost, "get_rank": dist.get_rank})
    )

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2), compare_every=0)
        ids, _ = tiny_batch(batch=2, length=5)
        ids[0, 3] = 10_000
        with pytest.raises(PipelineError, match="id-out-of-range") as error:
            parallel.step(ids, targets=next_tokens(ids))
        # it is the earliest that is known, and both ranks fail
        assert "failed on rank" in str(error.value) and error.value.slugs == ("stage-failed",)

    run_ranks(2, body)
