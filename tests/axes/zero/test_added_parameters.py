"""Parameters that train only since data axes were applied are trained as on one process: unfrozen ones, and added
ones."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from parallelize import accumulate_gradients, build_mesh, build_optimizer, parallelize_model, shard_data
from parallelize.base.errors import HandshakeError, ModelError
from tests.support.models import tiny_model
from tests.support.refused import refused
from tests.support.threads import run_ranks

LOCK = threading.Lock()  # ranks are threads with one default generator
WIDTH, STEPS = 6, 4
BATCHES = torch.randn(STEPS, 2, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.down.requires_grad_(False)
        self.head: nn.Module = nn.Identity()

    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))


def change(model, optimizer, rank: int) -> None:
    """Unfreeze `down`, and add a head that every rank initializes otherwise; the first rank's values count."""
    model.down.requires_grad_()
    optimizer.add_param_group({"params": list(model.down.parameters())})
    with LOCK:
        torch.manual_seed(5 + max(rank, 0))
        model.head = nn.Linear(WIDTH, 3).double()
    optimizer.add_param_group({"params": list(model.head.parameters())})


def train(model, optimizer, rank: int, batches) -> dict[str, torch.Tensor]:
    """Steps of batches [steps, microbatches, ...], which change the model after the second."""
    for step, batch in enumerate(batches):
        if step == 2:
            change(model, optimizer, rank)
        with accumulate_gradients(model) if rank >= 0 and step == 3 else torch.enable_grad():
            for microbatch in batch:
                model(microbatch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("zero", "dtype"), [(0, None), (1, None), (2, None), pytest.param(2, torch.float64, marks=pytest.mark.sweep)]
)
def test_weights_are_those_of_one_process(zero, dtype):
    torch.manual_seed(0)
    base = Block().double()
    copies = [copy.deepcopy(base) for _ in range(2)]
    adam = dict(lr=0.05, weight_decay=0.1)

    def body(rank):
        model = shard_data(copies[rank], build_mesh("cpu", dp=2), zero, reduce_dtype=dtype)
        optimizer = build_optimizer(model, torch.optim.AdamW, **adam)
        return train(model, optimizer, rank, BATCHES[:, :, 2 * rank : 2 * rank + 2])

    results = run_ranks(2, body)
    trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
    expected = train(base, torch.optim.AdamW(trained, **adam), -1, BATCHES)
    for actual in results:
        assert all((actual[name] - value).abs().max() < 1e-12 for name, value in expected.items())


def replace_layers(model, rank: int) -> list:
    """A linear of another size, and one of the same without a bias, which every rank initializes otherwise."""
    with LOCK:
        torch.manual_seed(5 + max(rank, 0))
        model.up, model.head = nn.Linear(WIDTH, 9, bias=False).double(), nn.Linear(WIDTH, 5).double()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.sweep), 2])
def test_replaced_layers_are_trained_as_on_one_process(zero):
    torch.manual_seed(0)
    base = Block().double()
    base.head = nn.Linear(WIDTH, 3).double()
    base.requires_grad_()  # `down` stays, in a new bucket
    copies = [copy.deepcopy(base) for _ in range(2)]
    adam = dict(lr=0.05, weight_decay=0.1)

    def steps(model, build, rank: int, batches) -> dict[str, torch.Tensor]:
        optimizer = build([parameter for parameter in model.parameters() if parameter.requires_grad])
        for step, batch in enumerate(batches):
            if step == 2:
                optimizer.zero_grad()
                optimizer = build(replace_layers(model, rank))
            for microbatch in batch:
                model(microbatch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def body(rank):
        model = shard_data(copies[rank], build_mesh("cpu", dp=2), zero)
        return steps(
            model,
            lambda params: build_optimizer(model, torch.optim.AdamW, params, **adam),
            rank,
            BATCHES[:, :, 2 * rank : 2 * rank + 2],
        )

    results = run_ranks(2, body)
    expected = steps(base, lambda params: torch.optim.AdamW(params, **adam), -1, BATCHES)
    for actual in results:
        assert actual.keys() == expected.keys()
        assert all((actual[name] - value).abs().max() < 1e-12 for name, value in expected.items())


@pytest.mark.sweep
def test_experts_over_data_ranks_are_not_replaced():
    base = tiny_model("mixtral")

    def body(rank):
        model = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), ep=2, zero=1).module
        model.model.layers[0].mlp.experts = copy.deepcopy(base.model.layers[0].mlp.experts)
        with refused(ModelError, "added-parameter", "divided over data ranks"):
            model(input_ids=torch.ones(1, 4, dtype=torch.long))

    run_ranks(2, body)


def test_layers_are_not_replaced_amid_gradients():
    base = Block().double().requires_grad_()

    def body(rank):
        model = shard_data(copy.deepcopy(base), build_mesh("cpu", dp=2), 1)
        model(BATCHES[0, 0]).sum().backward()
        replace_layers(model, 0)
        with refused(ModelError, "added-parameter", "while parameters have gradients"):
            model(BATCHES[0, 0])

    run_ranks(2, body)


def test_ranks_that_train_other_parameters_are_named():
    block = Block().double()
    copies = [copy.deepcopy(block) for _ in range(2)]

    def body(rank):
        model = shard_data(copies[rank], build_mesh("cpu", dp=2), 1)
        (model.down.weight if rank else model.down.bias).requires_grad_()
        with pytest.raises(HandshakeError, match=r"down\.weight") as error:
            model(BATCHES[0, 0])
        return error.value.slugs

    assert set(run_ranks(2, body)) == {("ranks-disagree",)}
