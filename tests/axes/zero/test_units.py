"""The units of ZeRO 3 are chosen once: what `shard_data` wraps is what `explain` predicts, by plan and by layers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize import ModelError, build_mesh, full_gradients, load_plan, parallelize_model, shard_data
from parallelize.base.mesh import MeshSpec
from parallelize.plan.models.model_source import ModelSource
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.shapes import fake_mesh
from parallelize.tools.analysis.subject import Subject
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

PLANS = {
    "layers": load_plan("llama"),
    "blocks": replace(load_plan("llama"), zero_units=("model.layers.*.{mlp,self_attn}",)),
    "one kind": replace(load_plan("llama"), zero_units=("model.layers.*.mlp", "lm_head")),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_units_of_a_plan(plan, axes):
    with fake_mesh(MeshSpec(**axes)) as mesh:
        model = tiny_model("llama", torch.float32)
        parallelize_model(model, mesh, PLANS[plan], zero=3)
    wrapped = [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    setting = Setting(MeshSpec(**axes), zero=3).complete()
    subject = Subject(ModelSource("llama", lambda _: tiny_model("llama")), PLANS[plan])
    predicted = subject.resolved(setting).zero_units
    assert wrapped == [name for name in predicted if name in wrapped] and wrapped
    if "pp" not in axes:
        assert wrapped == list(predicted)
    ending = {"layers": "0", "blocks": "self_attn", "one kind": "mlp"}[plan]
    assert wrapped[0].endswith(ending)


def test_a_pattern_without_a_match_is_an_error_in_both():
    with fake_mesh(MeshSpec(dp=2)) as mesh, pytest.raises(ModelError, match=r"unmatched-unit: .*layers\.\*\.mpl"):
        shard_data(tiny_model("llama", torch.float32), mesh, 3, units=["model.layers.*.{mlp,mpl}"])
    wrong = replace(load_plan("llama"), zero_units=("model.layers.*.mpl",))
    subject = Subject(ModelSource("llama", lambda _: tiny_model("llama")), wrong)
    with pytest.raises(ModelError, match="unmatched-unit"):
        subject.resolved(Setting(MeshSpec(dp=2), zero=3).complete())


@pytest.mark.parametrize("num_layers", [0, 3])
def test_a_model_whose_layers_nothing_names_is_said_to_be_one_unit(num_layers, caplog):
    model = nn.Module()
    model.first, model.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
    with fake_mesh(MeshSpec(dp=2)) as mesh:
        shard_data(copy.deepcopy(model), mesh, 3)
        assert ("gathers all parameters of Module at once" in caplog.text) == bool(num_layers)
        caplog.clear()
        shard_data(model, mesh, 3, units=["layers.*"] if num_layers else ["first"])
    assert not caplog.text


@pytest.mark.parametrize("units", [["0", "0.0"], ["0.0", "0"]], ids=str)
def test_a_unit_inside_of_another_may_be_called_by_itself(units):
    """As a part of the first block that a forward calls once more at its end. The order of the units is any."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)).double()
    models, x = [copy.deepcopy(plain) for _ in range(2)], torch.randn(2, 3, 4, dtype=torch.float64)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * model[0][0](x)).sum()

    loss(plain, x.flatten(0, 1)).backward()

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 3, units=units)
        loss(model, x[rank]).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)
