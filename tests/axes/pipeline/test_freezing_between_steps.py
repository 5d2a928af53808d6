"""Parameters are frozen and unfrozen between steps: also all of a first stage, whose outputs then need no gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, full_gradients, next_tokens, parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks

TRAINED = ["all", "last", "all", "first", "last", "all"]


def freeze(module: torch.nn.Module, trained: str) -> None:
    """By the names that a rank has, as a loop over `named_parameters` does."""
    for name, parameter in module.named_parameters():
        is_first = "embed" in name or "layers.0." in name
        parameter.requires_grad_(trained == "all" or is_first == (trained == "first"))


@pytest.mark.variants(every=1)
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("first", ["last", "all"])
def test_stages_thaw_and_freeze(schedule, zero, first):
    unsharded = tiny_model("llama", torch.float64, num_hidden_layers=4)
    axes = {"pp": 2, "dp": 2} if zero else {"pp": 2}
    models = [copy.deepcopy(unsharded) for _ in range(4 if zero else 2)]
    ids, _ = tiny_batch(batch=8, length=5)
    targets = next_tokens(ids)
    expected = []
    for trained in [first, *TRAINED]:
        freeze(unsharded, trained)
        unsharded.zero_grad()
        loss_of(unsharded(ids).logits, targets).backward()
        expected.append({n: p.grad for n, p in unsharded.named_parameters() if p.grad is not None})

    def body(rank: int) -> None:
        model, mesh = models[rank], build_mesh("cpu", **axes)
        freeze(model, "all")
        parallel = parallelize_model(model, mesh, num_microbatches=2, schedule=schedule, zero=zero)
        part = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4) if zero else slice(None)
        for trained, gradients in zip([first, *TRAINED], expected, strict=True):
            freeze(parallel.module, trained)
            parallel.module.zero_grad()
            parallel.step(ids[part], targets=targets[part])
            parallel.evaluate(ids[part], targets=targets[part])
            names = {n for n, p in parallel.module.named_parameters() if p.grad is not None}
            assert names == {n for n in gradients if n in dict(parallel.module.named_parameters())}
            gathered = full_gradients(parallel.module)
            for name in names:
                torch.testing.assert_close(gathered[name], gradients[name], rtol=1e-9, atol=1e-12)

    run_ranks(len(models), body)
