"""The guards of a plan over tp, as rows of the table of `state/guards/guard_table.py`."""

from __future__ import annotations

from parallelize.axes.tensor.torch_styles.shard_misuse import refuse_training_of_unclaimed, watch_first_forwards
from parallelize.axes.tensor.torch_styles.styles import CONVERTING, SHARDING
from parallelize.state.guards.guard_table import PLANNED, RESOLVED, STYLED, Guard, Guarded, add_guards
from parallelize.state.guards.other_libraries import refuse_wrappers
from parallelize.state.randomness.dropout.install import refuse_early_dropout


def _refuse_unclaimed(model: Guarded) -> None:
    if model.plan is not None and model.facts is not None:
        refuse_training_of_unclaimed(model.plan, model.facts)


def _watch(model: Guarded) -> None:
    if model.plan is not None and model.facts is not None:
        watch_first_forwards(model.plan, model.facts)


def _is_on_tp(model: Guarded) -> bool:
    return model.plan is not None and model.plan.tp_size > 1


def _has_pytorch_styles(model: Guarded) -> bool:
    """Whether PyTorch's own styles compute some module; a third party's may return full tensors and full gradients."""
    styles = model.plan.plan.unlowered_styles if model.plan is not None else ()
    return any(isinstance(item.style, (*SHARDING, *CONVERTING)) for item in styles)


add_guards(
    Guard(
        ("early-dropout",),
        "dropout that is installed before the axes whose ranks share its masks",
        (RESOLVED,),
        lambda model: refuse_early_dropout(model.module),
        applies=_is_on_tp,
    ),
    Guard(
        ("unclaimed-between-shards",),
        "training of parameters that no style of a dict names, and that read shards",
        (PLANNED, STYLED),
        _refuse_unclaimed,
    ),
    Guard(
        ("mixed-features", "mixed-sequence", "divided-features", "kept-shard", "added-parameter"),
        "operations of the first forwards that need all of what a rank has a shard of",
        (PLANNED, STYLED),
        _watch,
    ),
    Guard(
        ("other-data-parallel",),
        "DistributedDataParallel and `replicate` around modules that compute with shards",
        (STYLED,),
        lambda model: refuse_wrappers(model.module),
        applies=_has_pytorch_styles,
    ),
)
