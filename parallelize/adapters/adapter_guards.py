"""What a planned model needs of PEFT, and refuses, as rows of the table of `state/guards/guard_table.py`."""

from __future__ import annotations

from parallelize.adapters.added_adapters import plan_later_adapters
from parallelize.adapters.full_weights import add_to_sharded_units, guard_peft_reads, plan_before_merging
from parallelize.adapters.prompts import refuse_later_prompts, serve_stage_prompts
from parallelize.adapters.quantized_stacks import show_stacks_to_peft
from parallelize.adapters.stage_adapters import StageAdapters
from parallelize.base.mesh import DATA_AXES
from parallelize.state.guards.guard_table import (
    CUT,
    PLANNED,
    QUANTIZED,
    REDUCED,
    SHARDED,
    Guard,
    Guarded,
    add_guards,
)
from parallelize.state.later_changes import follow_changes
from parallelize.state.records import mark_applied


def _sums(model: Guarded) -> bool:
    return model.has_several(*DATA_AXES)


def _take_on_stages(model: Guarded) -> None:
    mark_applied(model.module, stage_adapters=StageAdapters(model.module))
    serve_stage_prompts()


def _watch_merging(model: Guarded) -> None:
    """Of adapters that the model has, and of those that it gets."""
    plan_before_merging()
    follow_changes(plan_before_merging)


add_guards(
    Guard(
        ("unplanned-adapter",),
        "adapters that begin with full weights, and merging into shards that nothing has planned",
        (PLANNED, CUT, SHARDED),
        lambda model: guard_peft_reads(),
    ),
    Guard(
        ("unplanned-adapter",),
        "merging of adapters that are not planned yet: they are planned first",
        (PLANNED, CUT, REDUCED),
        _watch_merging,
    ),
    Guard(
        ("added-parameter", "unplanned-adapter"),
        "what PEFT can only be asked for before the plan, of adapters that come after it; the others are planned",
        (PLANNED,),
        lambda model: plan_later_adapters(model.module),
    ),
    Guard(
        ("added-parameter",),
        "what PEFT can only be asked for before the cut, of adapters that come after it; the others are cut too",
        (CUT,),
        _take_on_stages,
    ),
    Guard(
        ("added-parameter",),
        "prompts that PEFT puts around a model whose gradients are summed",
        (REDUCED,),
        lambda model: refuse_later_prompts(),
        applies=_sums,
    ),
    Guard(
        ("added-parameter",),
        "adapters of sharded units that copy full weights; the others are added",
        (SHARDED,),
        lambda model: add_to_sharded_units(),
        applies=_sums,
    ),
    Guard(
        ("unplanned-adapter",),
        "adapters of quantized experts that need a dense weight; LoRA is added expert by expert",
        (QUANTIZED,),
        lambda model: show_stacks_to_peft(),
    ),
)
