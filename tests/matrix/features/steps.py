"""Steps, their batches, and what a step is given."""

from __future__ import annotations

from tests.matrix.feature import feature
from tests.matrix.sides import Side


@feature(names=("parallelize_model", "ParallelModel", "next_tokens", "full_gradients", "full_state_dict"))
def targets(side: Side) -> None:
    side.place()
    side.train()


@feature(needs={"stock"})
def labels(side: Side) -> None:
    side.place()
    for number in range(2):
        side.step(number, labels=side.local(side.kind.labels(number)))
        if not number:
            side.update()
