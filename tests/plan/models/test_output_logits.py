"""The logits in what models return, and models whose output has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, ShapeError, parallelize_model
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.output_logits import logits_of
from parallelize.tools.verification.verify import verify
from tests.support.refused import refused, small_mesh

T = torch.Tensor
LOGITS = torch.randn(2, 3, 5)


@pytest.mark.parametrize(
    "output",
    [LOGITS, (LOGITS,), (LOGITS, None), [LOGITS, torch.ones(())], {"logits": LOGITS}, SimpleNamespace(logits=LOGITS)],
    ids=["alone", "tuple", "beside none", "beside a loss", "mapping", "attribute"],
)
def test_logits_are_found(output):
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (None, "a NoneType"),
        ((), "a tuple of ()"),
        ((torch.ones(()), LOGITS), "a tuple of (a tensor [] of torch.float32, a tensor [2, 3, 5] of torch.float32)"),
        (torch.ones(2, 3, dtype=torch.long), "a tensor [2, 3] of torch.int64"),
        ({"hidden": LOGITS}, "a dict of hidden"),
        (SimpleNamespace(last_hidden_state=LOGITS), "a SimpleNamespace"),
    ],
    ids=["none", "nothing", "a loss first", "integers", "other names", "other attributes"],
)
def test_an_output_without_logits_is_named(output, text):
    with refused(ModelError, "no-logits", text, "`loss` of your own"):
        logits_of(output)


class Gpt(nn.Module):
    """Returns logits and a loss, as nanoGPT does; of the last position alone without targets, where it `is_short`."""

    def __init__(self, is_short: bool = False):
        super().__init__()
        self.is_short, self.table, self.head = is_short, nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, idx: T, targets: T | None = None) -> tuple[T, T | None]:
        x = self.table(idx)
        logits = self.head(x[:, [-1]] if self.is_short and targets is None else x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


PLAN = {"table": "embedding", "head": "colwise(output=full)"}


def test_a_step_of_a_model_that_returns_several_values():
    torch.manual_seed(0)
    model, ids, targets = Gpt(), torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    expected = model(ids, targets)[1]
    with small_mesh(tp=1) as mesh:
        parallel = parallelize_model(model, mesh, PLAN)
        torch.testing.assert_close(parallel.step(idx=ids, targets=targets), expected.detach(), check_dtype=False)


def test_verify_reads_the_first_of_several_values():
    assert verify(ModelSource("Gpt", lambda _: Gpt()), PLAN, "tp=2", trace=False).ok


def test_logits_of_other_positions_are_named():
    source = ModelSource("Gpt", lambda _: Gpt(is_short=True))
    with refused(ShapeError, "bad-targets", "logits [", "all positions"):
        verify(source, PLAN, "tp=2", trace=False)
