"""What every proof says, whatever is sharded, is what the error says; and a plan that shards nothing is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from parallelize.base.errors import ModelError


class TiedByAName(nn.Module):
    """The head reads the table by one of several names that are bound at once, which no check of source text
    follows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(53, 24), nn.Linear(24, 53)
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 60), nn.Linear(60, 24)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        table, x = self.embed, self.embed(batch)
        return (x + self.down(F.gelu(self.up(self.norm(x))))) @ table.weight.t()


def test_a_failure_of_every_proof_is_the_text_of_the_error():
    with pytest.raises(ModelError, match=r"no plan of .* is proven, whatever it shards") as error:
        derive_plan(TiedByAName(), {"batch": torch.randint(0, 53, (2, 5))})
    (problem,) = error.value.problems
    assert problem.slug == "nothing-to-shard"
    assert problem.rows[0][0] == "proof" and "got mixed torch.Tensor and DTensor" in problem.rows[0][1]


class OneInput(nn.MultiheadAttention):
    """A forward of its own, which the style of attention replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def test_a_plan_that_shards_nothing_is_not_handed_over():
    with pytest.raises(ModelError, match="no linear of OneInput can be sharded"):
        derive_plan(OneInput(24, 4, batch_first=True), {"x": torch.randn(2, 5, 24)})
