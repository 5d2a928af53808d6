"""Layers that only look alike are all run by `explain`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize import explain
from parallelize.base.errors import PlanError
from tests.tools.analysis.numbered_models import PLAN, Numbered, Reused


class Skipping(Numbered):
    """What early layers return is used by late ones."""

    def forward(self, ids):
        x, kept = self.embed(ids), []
        for layer in self.layers[:4]:
            x = torch.relu(layer(x))
            kept.append(x * 2)
        for layer in self.layers[4:]:
            x = torch.relu(layer(x + kept.pop()))
        return self.head(x)


class Private(Numbered):
    """Layers that differ in what is no public attribute."""

    def __init__(self):
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer._twice = number == 5
            if number == 4:
                layer.forward = lambda x, layer=layer: torch.tanh(F.linear(x, layer.weight, layer.bias))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(layer(x)) if layer._twice else layer(x)
        return self.head(x)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("kind", [Numbered, Reused, Skipping, Private])
def test_layers_that_only_look_alike_are_all_run(kind):
    few, every = (explain(kind, PLAN, "tp=2", sequence=8, every_layer=full) for full in (False, True))
    assert [(t.axis, t.count, t.bytes) for t in few.ranks[0].totals] == [
        (t.axis, t.count, t.bytes) for t in every.ranks[0].totals
    ]
    assert few.ranks[0].flops == every.ranks[0].flops
    assert few.ranks[0].memory.activations == every.ranks[0].memory.activations


def test_a_module_on_two_stages_is_refused():
    with pytest.raises(PlanError) as caught:
        explain(Reused, None, "pp=4", sequence=8, batch=8)
    assert "reused-module" in caught.value.slugs
