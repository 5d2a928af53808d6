"""Hooks on every module of the process: what they must not do to code that has no plan."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from parallelize.state.later_changes import when_changed


def test_a_graph_that_makes_modules_does_not_depend_on_the_models_of_the_process():
    """Slicing a ModuleList makes another one, as the forwards of `transformers` do in each call."""
    gc.collect()  # of earlier tests: what is patched ends with the last planned model, which must not be now
    torch._dynamo.reset()
    counter = CompileCounter()
    layers, others = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]), []
    when_changed(layers, lambda: None)

    @torch.compile(backend=counter, fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:2]:
            x = layer(x)
        return x

    for _ in range(3):
        run(torch.ones(1, 2))
        others.append(nn.Linear(2, 2))
        when_changed(others[-1], lambda: None)
    assert counter.frame_count == 1
