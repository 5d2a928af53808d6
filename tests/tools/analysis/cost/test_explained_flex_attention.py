"""`explain` predicts the messages of models that call `flex_attention`, and counts the blocks of their masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelize import explain
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from tests.support.flex_models import PLAN, WIDTH, Decoder, mask_of
from tests.tools.analysis.cost import flex_jobs as jobs


@pytest.mark.processes
@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"cp": 2}, {}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
        ({"cp": 4}, {"ulysses": 2, "recompute": "full"}),
        ({"pp": 2, "tp": 2}, {"num_microbatches": 2}),
    ],
)
def test_messages_are_those_of_real_ranks(two_processes, four_processes, sizes, options):
    pool = two_processes if sizes == {"cp": 2} else four_processes
    predictions = jobs.predicted_messages(sizes, 16, options)
    for pp_rank, other, sent in pool.run(jobs.sent_messages, sizes, 16, options):
        if other == 0:  # other ranks may have smaller shards
            assert sent == predictions[pp_rank]


BLOCKS = 16 * 17 // 2, 4 * (4 * 5 // 2), 16 * 16 // 2
"""Of 16 x 16, that are not empty: of one document, of four, and those that are assumed of a mask without values"""


def flops_of(mesh: str, documents: int) -> float:
    """Of a step of 64 tokens, with a mask in blocks of 4; 0 documents: the forward makes it, of tensors without
    values."""

    numbers = torch.arange(64) // (64 // max(1, documents))  # with values: outside of what is called for meta

    def inputs(rows: int, tokens: int) -> dict[str, Any]:
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        of_rows = numbers.expand(rows, -1)
        mask = {"block_mask": mask_of(of_rows)} if documents else {"documents": of_rows.to("meta")}
        return {"input_ids": ids, "targets": ids, **mask}

    source = ModelSource("flex", lambda _: Decoder(), extras={"inputs": inputs})
    return explain(source, parse_plan(PLAN), mesh, sequence=64, batch=2).time.flops


def test_the_blocks_of_a_mask_are_counted():
    """Seven matmuls of 2 layers, 2 sequences, of width 36, over a block's 4 x 4 scores; on two ranks half of them."""
    one, four, assumed = (flops_of("dp=1", documents) for documents in (1, 4, 0))
    of_block = 7 * 2 * 2 * 2 * WIDTH * 4 * 4
    assert one - four == of_block * (BLOCKS[0] - BLOCKS[1])
    assert one - assumed == of_block * (BLOCKS[0] - BLOCKS[2])
    assert flops_of("cp=2", 1) - flops_of("cp=2", 4) == (one - four) / 2
