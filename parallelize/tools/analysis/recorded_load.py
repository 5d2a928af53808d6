"""The operations of each pipeline unit by length, from recordings as of `explain`, and the balance of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.plan.stages import Stages
from parallelize.tools.analysis.cost.load_balance import LoadBalance, LoadMesh, LoadRecord, UnitLoad, balance_load
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.trace_data import LOSS, OUTSIDE
from parallelize.tools.analysis.subject import Subject

_WHOLE = "model"


def load_balance(subject: Subject, setting: Setting, record: LoadRecord) -> LoadBalance:
    """What balances a recorded load on the mesh of a setting. Raises: ModelError `bad-record`."""
    if not isinstance(record, LoadRecord):
        what = f"the record is a {type(record).__name__}"
        raise ModelError(Problem("bad-record", what, fix="record=parallelize.LoadRecord(lengths=[...])"))
    resolved = subject.resolved(setting)
    stages, shared = resolved.stages, setting.size("cp", "tp")
    experts = _experts(subject, setting)
    costs = unit_costs(subject, setting, experts)
    prefix = f"{stages.cuts.layers}." if stages is not None and stages.cuts.layers else ""
    layers = [unit for unit in stages.units if _is_layer(unit, prefix)] if stages is not None else [_WHOLE]
    mesh = LoadMesh(
        data_ranks=setting.size(*SAMPLE_AXES),
        shared=shared,
        ep=setting.ep if setting.etp == 1 and experts else 1,
        microbatches=setting.step_microbatches,
        stage_ranks=resolved.stage_ranks if stages is not None else (0,),
        starts=stages.starts if stages is not None else (0,),
        num_first=stages.num_first if stages is not None else 0,
        num_layers=len(layers),
    )
    return balance_load(record, costs, experts, mesh, record.samples or setting.batch * mesh.data_ranks)


def _is_layer(unit: str, prefix: str) -> bool:
    return unit.startswith(prefix) and "." not in unit[len(prefix) :]


def unit_costs(subject: Subject, setting: Setting, experts: Mapping[str, int]) -> list[UnitLoad]:
    """The operations of one rank in each unit, for a token and for a squared token: two recordings tell both.

    experts: name of each module of experts -> their number.
    """
    long, short = setting.sequence, max(setting.sequence // 2, 1)
    (of_long, choices), (of_short, _) = (_operations(subject, replace(setting, sequence=n)) for n in (long, short))
    names, facts, costs = list(experts), subject.model(setting.weights_dtype), []
    passes = 4 if setting.recompute == "full" else 3
    for unit, at_long in of_long.items():
        at_short = of_short.get(unit, 0.0)
        pair = max((at_long / long - at_short / short) / (long - short), 0.0) if long > short else 0.0
        inside = [name for name in names if unit == _WHOLE or name == unit or name.startswith(f"{unit}.")]
        expert = sum(_weights(facts.modules[name].shapes) for name in inside)
        of_experts = 2.0 * passes * choices / long * expert
        token = at_long / long - pair * long
        layers = tuple(names.index(name) for name in inside)
        costs.append(UnitLoad(unit, token, pair, min(of_experts, token), layers))
    return costs


def _weights(shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Elements of the matrices of one expert."""
    return float(sum(prod(shape[1:]) for shape in shapes.values() if len(shape) == 3))


def _experts(subject: Subject, setting: Setting) -> dict[str, int]:
    modules = subject.model(setting.weights_dtype).modules
    return {fqn: module.num_experts for fqn, module in modules.items() if module.kind == "experts"}


def _operations(subject: Subject, setting: Setting) -> tuple[dict[str, float], int]:
    """(forward and backward of one sequence on one rank, by unit; pairs of a token and an expert that it computes in a
    call of experts over `ep`). What is outside of all units counts to their ends."""
    single = replace(
        setting,
        mesh=setting.mesh.only(*(axis for axis in setting.mesh.names if axis != "pp")),
        batch=1,
        num_microbatches=1,
        schedule="1f1b",
        stages_per_rank=None,
        overlap="off",  # experts would be called in chunks
        overlap_microbatches=False,
    )
    step = subject.rank_step(single, single.pipeline(), 0)
    segments = step.segments(0, later=True)
    names = list(step.stages.units) if isinstance(step.stages, Stages) else [_WHOLE]
    sums = dict.fromkeys(names, 0.0)
    ends = {OUTSIDE: names[0], LOSS: names[-1]}
    for segment in (*segments.forward, *segments.backward):
        unit = ends.get(segment.unit, segment.unit)
        sums[unit if unit in sums else names[0]] += segment.flops
    return sums, step.trace.expert_choices
