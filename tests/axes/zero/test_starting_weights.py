"""Ranks that store the same parameters begin with equal weights, or are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from parallelize import ParallelizeError, build_mesh, parallelize_model, parallelize_module, shard_data
from parallelize.comm.handshake import digest
from tests.support.refused import RULES, WIDTH, Block
from tests.support.threads import run_ranks


def blocks(seeds: list[int]) -> list[Block]:
    """A block for each rank."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(Block())
    return models


def slugs_of(seeds: list[int], apply: Callable[[Block], Any]) -> list[tuple[str, ...]]:
    """What each rank raises when `apply` gets a block that was drawn from its seed; () for nothing."""
    models = blocks(seeds)

    def body(rank: int) -> tuple[str, ...]:
        try:
            apply(models[rank])
        except ParallelizeError as error:
            assert "check_replicated=False" in str(error) or "ranks-disagree" in error.slugs
            assert all(type(parameter) is nn.Parameter for parameter in models[rank].parameters())
            return error.slugs
        return ()

    return run_ranks(len(seeds), body)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("function", [parallelize_model, shard_data], ids=lambda function: function.__name__)
def test_data_ranks_with_other_weights(function, zero):
    def apply(model: Block, **options: Any) -> None:
        units = {"units": ["up", "down"]} if function is shard_data and zero == 3 else {}
        function(model, build_mesh("cpu", dp=2), zero=zero, **units, **options)

    assert slugs_of([0, 1], apply) == [("replicas-differ",)] * 2
    assert slugs_of([1, 1], apply) == [()] * 2
    assert slugs_of([0, 1], lambda model: apply(model, check_replicated=False)) == [()] * 2


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_weights_are_compared_where_they_are_read(axes):
    """Over tp the first rank's are broadcast, so those of the others do not matter."""

    def apply(model: Block) -> None:
        parallelize_model(model, build_mesh("cpu", **axes), RULES)

    over_tp = "tp" in axes
    assert slugs_of([0, 7, 0, 8], apply) == ([()] * 4 if over_tp else [("replicas-differ",)] * 4)
    others = [("replicas-differ",), ("ranks-disagree",)] * 2 if over_tp else [("replicas-differ",)] * 4
    assert slugs_of([0, 0, 1, 1], apply) == others


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_buffers_are_compared_with_the_weights(axes):
    """A rotary table, or a random projection, that one rank has made otherwise; those of `tp` are not broadcast."""

    def apply(model: Block) -> None:
        seed = int(model.up.bias.detach().sum() * 1e6)
        model.down.register_buffer("scale", torch.tensor([float(seed), 1.0]), persistent=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        parallelize_model(model, build_mesh("cpu", **axes), RULES)

    assert slugs_of([0, 1], apply) == [("replicas-differ",)] * 2
    assert slugs_of([1, 1], apply) == [()] * 2


def test_an_equal_group_waits_for_one_that_differs():
    assert slugs_of([0, 0, 1, 0], lambda model: shard_data(model, build_mesh("cpu", dp=2, tp=2))) == [
        ("replicas-differ",),
        ("ranks-disagree",),
        ("replicas-differ",),
        ("ranks-disagree",),
    ]


def test_a_function_that_fills_each_rank_in_another_way():
    with torch.device("meta"):
        models = [Block() for _ in range(2)]

    def body(rank: int) -> tuple[str, ...]:
        def fill(model: nn.Module) -> None:
            for parameter in model.parameters():
                nn.init.constant_(parameter, rank)

        try:
            parallelize_model(models[rank], build_mesh("cpu", dp=2), initialize=fill)
        except ParallelizeError as error:
            return error.slugs
        return ()

    assert run_ranks(2, body) == [("replicas-differ",)] * 2


@pytest.mark.parametrize("source", [0, None])
def test_replicated_parameters_of_tensor_parallelism(source):
    """The bias of a row linear is replicated. It is broadcast unless every rank splits its own weights."""

    def apply(model: Block, **options: Any) -> None:
        parallelize_module(model, build_mesh("cpu", tp=2), RULES, src_data_rank=source, **options)

    assert slugs_of([0, 1], apply) == [()] * 2 if source == 0 else [("replicas-differ",)] * 2
    assert slugs_of([0, 1], lambda model: apply(model, check_replicated=False)) == [()] * 2
    assert slugs_of([0, 1], lambda model: apply(model, check_replicated=True)) == [("replicas-differ",)] * 2


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("local", [True, False], ids=["tensors", "DTensors"])
def test_parameters_that_no_style_names_are_compared_over_tp(source, local):
    """They stay plain, as each rank has drawn them."""

    def apply(model: Block, **options: Any) -> None:
        styles = {"up": ColwiseParallel(output_layouts=Replicate(), use_local_output=local)}
        parallelize_module(model, build_mesh("cpu", tp=2), styles, src_data_rank=source, **options)

    assert slugs_of([0, 1], apply) == [("replicas-differ",)] * 2
    assert slugs_of([1, 1], apply) == [()] * 2
    assert slugs_of([0, 1], lambda model: apply(model, check_replicated=False)) == [()] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_a_digest_tells_tensors_apart(dtype):
    values = (torch.arange(300) % 7 - 3).to(dtype)
    different = [values[1:], values.reshape(3, 100), values.flip(0), values.roll(1)]
    if dtype != torch.bool:
        signs = torch.ones(300)
        signs[[8, 16]] = -1  # two changes of the top bit
        different += [values * signs.to(dtype), values.clone().index_fill_(0, torch.tensor(299), 5)]
    digests = {tuple(digest(tensor).tolist()) for tensor in (values, *different)}
    assert len(digests) == 1 + len(different)
    assert torch.equal(digest(values), digest(values.clone()))
    assert torch.equal(digest(values[1:9]), digest(values[1:9].clone()))  # of another alignment


def test_nothing_but_a_digest_is_sent_where_weights_are_equal():
    models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    sent: list[int] = []

    def body(rank: int) -> None:
        from parallelize.comm.groups import Group

        mesh = build_mesh("cpu", dp=2)
        group = Group(mesh.get_group("dp"))
        stock = Group.all_gather

        def counting(self: Group, x: torch.Tensor) -> torch.Tensor:
            sent.append(x.numel() * x.element_size())
            return stock(self, x)

        if rank == 0:
            Group.all_gather = counting
        try:
            shard_data(models[rank], mesh)
            group.all_reduce(torch.zeros(1))  # the other rank has finished too
        finally:
            if rank == 0:
                Group.all_gather = stock

    run_ranks(2, body)
    assert sent and set(sent) == {40} and len(sent) <= 2
