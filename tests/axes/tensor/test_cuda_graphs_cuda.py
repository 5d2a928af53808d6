"""A planned forward that is captured in a CUDA graph, collectives included, and replayed with another input."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh, parallelize_module
from tests.support import device
from tests.support.models import tiny_batch, tiny_model

pytestmark = pytest.mark.skipif(device.CHOSEN != "cuda", reason="PARALLELIZE_TEST_DEVICE=cuda runs it")


def _replayed(rank: int, sequence_parallel: bool) -> float:
    """The largest difference between the logits of a replay and those of the same forward without a graph."""
    model = parallelize_module(tiny_model("llama").eval(), build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel)
    first, second = (tiny_batch(seed=seed, length=8)[0] for seed in (1, 2))
    ids = first.clone()
    with torch.no_grad():
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(2):
                model(input_ids=ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(input_ids=ids, use_cache=False).logits
        ids.copy_(second)
        graph.replay()
        expected = model(input_ids=second, use_cache=False).logits
    return float((logits - expected).abs().max())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_a_replay_is_the_forward(two_processes, sequence_parallel):
    assert two_processes.run(_replayed, sequence_parallel) == [0.0, 0.0]
