"""ZeRO 3 with parameters that some ranks, some microbatches or no rank uses: gradients as of the unsharded model."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from parallelize import accumulate_gradients, build_mesh, shard_data
from parallelize.comm.groups import axis_group
from tests.support.threads import run_ranks

WIDTH = 6
MESHES = {"dp": {"dp": 2}, "uneven": {"dp": 4}, "hybrid": {"dp_replicate": 2, "dp_shard": 2}}


class Choice(nn.Module):
    """Adds one of two branches to its input. The third is never used."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return x + torch.tanh((self.left if left else self.right)(x))


class Choices(nn.Module):
    """Each layer takes the branch of its bit in `bits`; the head's scale is used where `scaled`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Choice() for _ in range(2))
        self.head, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor, bits: int, scaled: bool) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x, bool(bits >> n & 1))
        return self.head(x) * self.scale if scaled else self.head(x)


def choices() -> Choices:
    torch.manual_seed(0)
    return Choices().double()


def call_of(rank: int, number: int) -> tuple[torch.Tensor, int, bool]:
    """The inputs of one backward of a data rank: others take other branches, and nobody takes layer 1's left in number
    0."""
    x = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + number))
    bits = (rank + number) % 2 if number == 0 else (rank + number) % 4
    return x, bits, rank == 1


def full(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.full_tensor()


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("mode", ["each backward", "accumulated", "deferred"])
@pytest.mark.parametrize("axes", MESHES)
def test_gradients_are_those_of_the_unsharded_model(axes, mode):
    unsharded, world = choices(), 2 if axes == "dp" else 4
    models = [copy.deepcopy(unsharded) for _ in range(world)]
    numbers = range(1 if mode == "each backward" else 3)
    for rank in range(world):
        for number in numbers:
            unsharded(*call_of(rank, number)).pow(2).sum().backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters()}
    assert any(grad is None for grad in expected.values())

    def body(rank: int) -> None:
        model = shard_data(
            models[rank], build_mesh("cpu", **MESHES[axes]), 3, units=["layers.*"], defer=mode == "deferred"
        )
        for _ in range(2):
            model.zero_grad()
            with nullcontext() if mode == "each backward" else accumulate_gradients(model):
                for number in numbers:
                    model(*call_of(rank, number)).pow(2).sum().backward()
        for name, parameter in model.named_parameters():
            grad = full(parameter.grad)
            assert (grad is None) == (expected[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)

    run_ranks(world, body)


def test_gradients_in_another_dtype_than_that_of_compute():
    """Some microbatches use a parameter, and sums over microbatches are wider than gradients."""
    unsharded = choices().float()
    models = [copy.deepcopy(unsharded) for _ in range(2)]
    for rank in range(2):
        for number in range(3):
            x, bits, scaled = call_of(rank, number)
            unsharded(x.float(), bits, scaled).pow(2).sum().backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters()}

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        model = shard_data(models[rank], mesh, 3, units=["layers.*"], defer=True, dtype=torch.bfloat16)
        with accumulate_gradients(model):
            for number in range(3):
                x, bits, scaled = call_of(rank, number)
                model(x.bfloat16(), bits, scaled).float().pow(2).sum().backward()
        for name, parameter in model.named_parameters():
            grad = full(parameter.grad)
            assert (grad is None) == (expected[name] is None), name
            if grad is not None:
                assert float((grad - expected[name]).norm() / expected[name].norm()) < 8 * 2**-8, name

    run_ranks(2, body)


def test_a_backward_that_failed_leaves_nothing_behind():
    models = [choices() for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 3, units=["layers.*"])
        with pytest.raises(ValueError, match="on purpose"), accumulate_gradients(model):
            model(*call_of(rank, 1)).pow(2).sum().backward()
            raise ValueError("on purpose")
        model.zero_grad()
        model(*call_of(rank, 0)).pow(2).sum().backward()
        assert model.layers[0].never.weight.grad is None
        group = axis_group(model.layers[0].left.weight.device_mesh, "dp")
        assert group.size() == 2 and model.layers[0].left.weight.grad is not None

    run_ranks(2, body)
