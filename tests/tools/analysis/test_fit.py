"""`fit` measures few settings in full, and returns what measuring all of them would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from parallelize.base.mesh import MeshSpec
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.analysis import fit as searched
from parallelize.tools.analysis.cost.machine import load_machine
from parallelize.tools.analysis.cost.setting import make_setting
from parallelize.tools.analysis.fit import candidates, fit, meshes
from parallelize.tools.analysis.subject import Subject
from tests.support.models import tiny_model

GPUS, BATCH, SEQUENCE = 4, 64, 64


def subject() -> Subject:
    return Subject(ModelSource("llama", lambda _: tiny_model("llama", num_hidden_layers=4)), None)


def measured(of: Subject, memory_bytes: float) -> list[tuple[str, float]]:
    """(mesh, seconds) of the fastest setting of each mesh, of all settings, in order."""
    machine = load_machine("h100-sxm")
    base = of.complete(make_setting(MeshSpec(dp=1), {"sequence": SEQUENCE, "dtype": "bfloat16", "optimizer": "adamw"}))
    rejections, best = searched._Rejections(), {}
    for mesh in meshes(GPUS, machine.node_ranks, 4):
        for setting in candidates(replace(base, mesh=mesh), BATCH, rejections.add):
            candidate = searched._try(of, setting, machine, memory_bytes, rejections)
            if candidate is not None:
                best[str(mesh)] = min(best.get(str(mesh), candidate.step_s), candidate.step_s)
    return sorted(best.items(), key=lambda item: item[1])


@pytest.mark.sweep
@pytest.mark.parametrize("memory_bytes", [1e9, 1.7e6])
def test_it_returns_what_measuring_all_settings_would(memory_bytes):
    """With memory for all of them, and for some."""
    of = subject()
    expected = measured(of, memory_bytes)
    machine = load_machine("h100-sxm")
    result = fit(of, GPUS, machine, memory_bytes=memory_bytes, global_batch=BATCH, sequence=SEQUENCE, most=3)
    found = [(str(candidate.setting.mesh), candidate.step_s) for candidate in result.best]
    assert found == expected[:3] and len(found) == 3
    assert any(item.reason == searched._TOO_LARGE for item in result.rejected) == (memory_bytes < 1e9)


def test_foldings_of_experts_are_tried():
    """Eight wide experts on four data ranks: `ep` 4 is tried, and takes less than half of the memory."""
    config = {"num_local_experts": 8, "intermediate_size": 512, "num_hidden_layers": 2}
    of = Subject(ModelSource("mixtral", lambda _: tiny_model("mixtral", **config)), None)
    options = {"zero": 0, "schedule": "1f1b", "recompute": "off", "num_microbatches": 4}
    machine = load_machine("h100-sxm")
    over_data = [mesh for mesh in meshes(GPUS, machine.node_ranks, 2) if mesh.ranks("dp") == 4]
    assert over_data and searched._foldings(over_data[0], 8, 1, machine.node_ranks) == (1, 4)
    assert searched._foldings(over_data[0], 8, 2, machine.node_ranks) == (1, 2)
    peaks = {
        ep: searched._try(
            of,
            make_setting(over_data[0], {"sequence": 16, "batch": 4, "ep": ep, **options}).complete(),
            machine,
            1e9,
            searched._Rejections(),
        ).peak_bytes
        for ep in (1, 4)
    }
    assert peaks[4] < 0.5 * peaks[1]


def test_a_plan_without_a_region_is_fitted_over_tp_too():
    """No setting is refused for a mode that the plan does not serve."""
    layers = "model.layers.*"
    rules = {f"{layers}.self_attn.{{q,k,v}}_proj": "colwise(heads)", f"{layers}.self_attn.o_proj": "rowwise(heads)"}
    rules |= {f"{layers}.mlp.{{gate,up}}_proj": "colwise", f"{layers}.mlp.down_proj": "rowwise", "**": "replicate"}
    sizes = {"heads": {"from": "num_key_value_heads"}}
    of = Subject(
        subject().source, parse_plan(yaml.safe_dump({"schema_version": 1, "sizes": sizes, "tensor_parallel": rules}))
    )
    options = {"zero": 0, "schedule": "1f1b", "recompute": "off", "num_microbatches": 8}
    result = fit(of, 4, load_machine("h100-sxm"), global_batch=BATCH, sequence=SEQUENCE, most=9, **options)
    assert any(candidate.setting.size("tp") == 4 for candidate in result.best) and result.modes == ()
    assert not any("no-region" in item.reason or "no-vocabulary" in item.reason for item in result.rejected)
