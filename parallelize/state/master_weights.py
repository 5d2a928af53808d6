"""The wider copies of parameters that an optimizer steps, where a model computes in bfloat16 or float16 (ZeRO 0 to 2)."""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.state.records import applied


def master_weights(root: nn.Module) -> dict[int, Any]:
    """id of a parameter -> what an optimizer steps in its place, with what was written to the parameter since its last step.

    root: the model that `shard_data` was given. Empty where an optimizer steps the parameters themselves.
    """
    data = applied(root).data
    shards = [shard for shard in data.shards if shard.has_master] if data is not None else []
    for shard in shards:
        shard.follow_edits()
    return {id(shard.param): shard.stepped for shard in shards}
