"""Parameters that train only since data axes were applied are trained as on one process: unfrozen ones, and added ones."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from parallelize import accumulate_gradients, build_mesh, build_optimizer, shard_data
from parallelize.errors import HandshakeError
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
