"""What a rank says of a step that failed because another rank is gone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelize import PipelineError
from parallelize.axes.pipeline.failure import Failure, sum_outcomes

CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:39839"


@pytest.mark.parametrize(
    ("error", "slug"),
    [(RuntimeError(CLOSED), "peer-lost"), (ValueError("boom"), "stage-failed")],
    ids=["of a lost peer", "of its own"],
)
def test_a_rank_does_not_name_itself_for_a_peer_that_is_lost(error, slug, monkeypatch):
    def gone(*args, **kwargs):
        raise RuntimeError(CLOSED)

    monkeypatch.setattr(dist, "all_reduce", gone)
    local = Failure(0, 0, 0, "backward", "", f"{type(error).__name__}: {error}", 1.0)
    with pytest.raises(PipelineError) as raised:
        sum_outcomes(torch.zeros(2), None, local, error)
    assert raised.value.slugs == (slug,)
    assert ("rank 0" in str(raised.value)) == (slug == "stage-failed")
    assert raised.value.__cause__ is error


def test_a_rank_without_a_failure_of_its_own_raises_what_its_collective_raised(monkeypatch):
    def gone(*args, **kwargs):
        raise RuntimeError(CLOSED)

    monkeypatch.setattr(dist, "all_reduce", gone)
    with pytest.raises(RuntimeError, match="by peer"):
        sum_outcomes(torch.zeros(2), None, None, None)
