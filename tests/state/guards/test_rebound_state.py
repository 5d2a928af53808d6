"""What refers to a parameter gets what takes its place: an optimizer with it the state that was loaded before."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallelize import build_mesh
from parallelize.base.layout import chunked
from parallelize.state.guards.early_optimizers import rebind_parameters
from tests.support.threads import run_ranks


def test_the_state_of_a_parameter_goes_with_what_takes_its_place():
    def body(rank: int) -> tuple[torch.Tensor, ...]:
        values = torch.arange(12.0).reshape(4, 3)
        old = nn.Parameter(values.clone())
        optimizer = torch.optim.SGD([old], momentum=0.9)
        optimizer.load_state_dict(
            {
                "state": {0: {"momentum_buffer": 10 + values, "step": torch.tensor(2.0)}},
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )
        mesh = build_mesh("cpu", tp=2)
        new = nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)], src_data_rank=None))
        rebind_parameters([(old, new, chunked((4, 3), 0, 2))])
        assert optimizer.param_groups[0]["params"][0] is new and list(optimizer.state) == [new]
        state = optimizer.state[new]
        assert isinstance(state["momentum_buffer"], DTensor) and state["step"] == 2
        return state["momentum_buffer"].to_local(), state["momentum_buffer"].full_tensor()

    expected = 10 + torch.arange(12.0).reshape(4, 3)
    for rank, (local, full) in enumerate(run_ranks(2, body)):
        assert torch.equal(local, expected[2 * rank : 2 * rank + 2]) and torch.equal(full, expected)
