"""What is asked of a mixture's routers: their load, their choices, a balance; and the ranks that have its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize import balanced_routing, record_routes, replay_routes, routing_load
from tests.matrix.axes import Axis
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


# -- folded over the axes of any mesh, at each stage of ZeRO -----------------------------------------------------------


def _train(side: Side) -> None:
    """With the norm, which counts each part of an expert once."""
    side.step(0)
    side.step(1)
    side.clip(0.3)
    side.update()
    side.step(2)


def _trains_with(**options: Any) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        side.place(**options)
        _train(side)

    return run


def _on_ranks(number: int, zero: int = 0) -> Callable[[Axis], bool]:
    """Ranks of `dp`, `cp` and `tp`, over which experts go; replicas and stages have them once more."""
    return lambda axis: axis.ranks("dp", "cp", "tp") >= number and (not zero or axis.data_ranks > 1)


PLACEMENT = {"model.layers.*.mlp.experts": [4, 1, 3, 0, 2, 5]}
"""Of six experts over ranks: no rank has consecutive ones alone, and of four ranks some have one."""

for _zero in range(4):
    feature(name=f"placed_experts_zero_{_zero}", needs={"experts"}, on=_on_ranks(2, _zero))(
        _trains_with(ep=2, etp=1, zero=_zero, expert_placement=PLACEMENT)
    )
feature(name="placed_experts_over_four_ranks", needs={"experts"}, on=_on_ranks(4))(
    _trains_with(ep=4, etp=1, expert_placement=PLACEMENT)
)
for _zero in range(4):
    feature(name=f"whole_experts_zero_{_zero}", needs={"experts"}, on=_on_ranks(2, _zero))(
        _trains_with(ep=2, etp=1, zero=_zero)
    )
    feature(name=f"split_experts_zero_{_zero}", needs={"experts"}, on=_on_ranks(2, _zero))(
        _trains_with(ep=1, etp=2, zero=_zero)
    )
feature(name="whole_experts_that_are_split", needs={"experts"}, on=_on_ranks(4))(_trains_with(ep=2, etp=2))
feature(name="experts_over_four_ranks", needs={"experts"}, on=_on_ranks(4))(
    _trains_with(ep=4, etp=1)
)  # one or two each
feature(name="recomputed_experts_zero_3", needs={"experts"}, on=_on_ranks(2, 3))(
    # a unit with one copy of each expert gathers nothing, and runs other ops in a replay
    _trains_with(ep=2, etp=1, zero=3, recompute="selective")
)
for _name, _options in {"whole": {"ep": 2, "etp": 1}, "split": {"ep": 1, "etp": 2}}.items():
    feature(name=f"deferred_{_name}_experts", needs={"experts"}, on=_on_ranks(2, 2))(
        # what `dp` splits is reduced in each backward; experts that it does not split, once per step
        _trains_with(**_options, zero=2, defer=True, num_microbatches=2)
    )


FIRST_IS_DENSE = {"mixture": {"mlp_only_layers": [0], "num_hidden_layers": 2}}

for _zero in (1, 3):  # a stage without experts, whose ranks are in the groups of the experts too
    feature(
        name=f"stage_without_experts_zero_{_zero}",
        needs={"experts"},
        overrides=FIRST_IS_DENSE,
        on=lambda axis: axis.mixture and axis.ranks("pp") > 1,
    )(_trains_with(zero=_zero))
