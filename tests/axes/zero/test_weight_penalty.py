"""A penalty on weights counts once, as on one process, where weights are tied; the matrix has the other meshes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, add_penalty, build_mesh, full_gradients, next_tokens, parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks

TIED = [({"pp": 2}, {}), ({"pp": 2, "dp": 2}, {"zero": 1}), ({"tp": 2}, {}), ({"dp": 2}, {"zero": 3})]


def pulled(start: dict[str, torch.Tensor]) -> Any:
    """L2-SP on all matrices but those of the first layer; L1 on the others; nothing on biases."""

    def penalty(name: str, weight: torch.Tensor) -> torch.Tensor | None:
        if name.endswith("bias"):
            return None
        if weight.ndim < 2 or "layers.0" in name:
            return 0.01 * weight.abs().sum()
        return 0.3 * (weight - start[name]).square().sum()

    return penalty


def starts(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: 0.9 * p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("axes", "options"), TIED, ids=str)
def test_value_and_gradients_are_those_of_one_process(axes, options):
    unsharded = tiny_model("qwen2", torch.float64, num_hidden_layers=2, tie_word_embeddings=True)
    models = [copy.deepcopy(unsharded) for _ in range(math.prod(axes.values()))]
    ids, _ = tiny_batch(batch=8, length=6)
    targets = next_tokens(ids)
    loss, penalty = loss_of(unsharded(ids).logits, targets), pulled(starts(unsharded))
    value = sum(penalty(n, p) for n, p in unsharded.named_parameters() if not n.endswith("bias"))
    (loss + value).backward()

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), num_microbatches=2, **options)
        number = axes.get("dp", 1)
        index = parallel.mesh.get_local_rank("dp") if number > 1 else 0
        part = slice(8 // number * index, 8 // number * (index + 1))
        ours = pulled(starts(parallel.module))
        parallel.step(ids[part], targets=targets[part])
        total = parallel.add_penalty(ours)
        torch.testing.assert_close(total, value.detach(), rtol=1e-12, atol=0)
        gradients = full_gradients(parallel.module)
        for name, p in unsharded.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)

    run_ranks(len(models), body)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(3, 5), "unused": nn.Linear(5, 3)}).double()


class Net(nn.Module):
    """Half of its parameters are in no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("zero", range(4))
def test_unused_parameters_have_the_penalty_alone_and_later_backwards_add_to_it(zero):
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double(), torch.arange(4) % 5
    unsharded = Net().double()
    models = [Net().double() for _ in range(2)]

    def decay(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight.square().sum()

    for _ in range(2):
        F.cross_entropy(unsharded(x), y).backward()
        sum(decay("", p) for p in unsharded.parameters()).backward()

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        parallel = parallelize_model(models[rank], mesh, zero=zero)
        for _ in range(2):
            (F.cross_entropy(parallel.module(x[2 * rank : 2 * rank + 2]), y[2 * rank : 2 * rank + 2]) / 2).backward()
            add_penalty(parallel.module, decay)
        gradients = full_gradients(parallel.module)
        for name, p in unsharded.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)

    run_ranks(2, body)


def test_a_plain_model_needs_no_mesh():
    model = net()
    value = add_penalty(model, lambda name, weight: weight.abs().sum())
    torch.testing.assert_close(value, sum(p.detach().abs().sum() for p in model.parameters()))
    assert all(torch.equal(p.grad, p.detach().sign()) for p in model.parameters())


def test_what_is_no_scalar_is_refused_before_gradients_change():
    model = net()
    with pytest.raises(ModelError) as caught:
        add_penalty(model, lambda name, weight: weight.sum() if "unused" not in name else weight.square())
    assert caught.value.problems[0].slug == "bad-penalty"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("zero", range(3))
def test_a_backward_of_weights_alone_is_named_with_the_ranks_that_count_it(zero):
    from parallelize.axes.zero import reducer

    texts: list[str] = []
    models = [Net().double() for _ in range(2)]
    reducer._warn_once.cache_clear()

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=zero)
        parallel.module(torch.ones(1, 3).double()).sum().backward()
        assert not texts
        sum(p.square().sum() for p in parallel.module.parameters()).backward()

    original, reducer._warn_once = reducer._warn_once, texts.append  # the same for all ranks, which are threads
    try:
        run_ranks(2, body)
    finally:
        reducer._warn_once = original
    assert len(set(texts)) == 1 and "summed over 2 data ranks" in texts[0]
