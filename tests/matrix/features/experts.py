"""What is asked of a mixture's routers: their load, their choices, a balance."""

from __future__ import annotations

import torch

from parallelize import balanced_routing, record_routes, replay_routes, routing_load
from tests.matrix.feature import feature
from tests.matrix.features.losses import NOT_BY_HAND
from tests.matrix.kinds import LENGTH, ROWS
from tests.matrix.sides import Side


@feature(needs={"experts"})
def load_of_experts(side: Side) -> None:
    """Counting changes nothing of a step."""
    side.place()
    with routing_load(side.model):
        side.step(0)


@feature(needs={"experts"})
def balanced_experts(side: Side) -> None:
    """Choices that are even, for timings, and leave nothing behind. What they compute means nothing."""
    side.place()
    if not side.alone:
        with balanced_routing(side.model):
            side.parallel.evaluate(**side.inputs(0), targets=side.targets(0))
    side.step(0)


@feature(needs={"experts"}, refused=NOT_BY_HAND)
def replayed_routes(side: Side) -> None:
    """The choices of a first forward are those of a later step."""
    side.place()
    with record_routes(side.model) as routes:
        side.evaluate(0)
    with replay_routes(side.model, routes):
        side.step(0)


@feature(needs={"experts"})
def given_routes(side: Side) -> None:
    """Choices that no router would make, of which some are missing, also in the layers that backward recomputes."""
    config, generator = side.model.config, torch.Generator().manual_seed(5)
    layers, experts, k = config.num_hidden_layers, config.num_experts, config.num_experts_per_tok
    routes = torch.rand(ROWS * LENGTH, layers, experts, generator=generator).topk(k, -1).indices
    routes[torch.rand(ROWS * LENGTH, layers, generator=generator) < 0.2] = -1
    side.place(recompute="full")
    with replay_routes(side.model, routes), record_routes(side.model) as seen:
        side.step(0)
    side.record("chosen", seen.gather())
