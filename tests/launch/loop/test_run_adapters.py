"""A run whose file asks for a quantized base and adapters: what trains, and what files may say."""

from __future__ import annotations

import sys

import pytest
import torch

from parallelize import build_mesh
from parallelize.base.errors import LaunchError, ModelError
from parallelize.base.mesh import MeshSpec
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.loop.build_run import RunEnvironment, build_model
from parallelize.launch.preflight.base_model import source_of_run
from parallelize.launch.preflight.mesh_choice import ChosenMesh
from parallelize.plan.options import Options
from parallelize.state.quantization.quantized_linear import QuantizedLinear
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

SIZES = dict(hidden_size=64, head_dim=8, intermediate_size=128)
FILE = """
model:
  name: {folder}
  initialize: {folder}
  quantize: nf4(block=16)
  lora: {{r: 4, target_modules: [q_proj, v_proj]}}
data: {{function: "tests:none"}}
mesh: {{tp: 2}}
"""


def config_of(folder, text: str = FILE):
    return parse_run_config(text.format(folder=folder))


def test_adapters_train_on_a_base_that_is_quantized_while_it_is_read(tmp_path):
    pytest.importorskip("peft")
    tiny_model("llama", torch.float32, **SIZES).save_pretrained(tmp_path)
    config, (ids, labels) = config_of(tmp_path), tiny_batch(67)

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        chosen = ChosenMesh(MeshSpec(tp=2), Options(zero=0))
        parallel, _, _ = build_model(config, RunEnvironment(chosen, mesh, "cpu", None, print))
        parallel.step(input_ids=ids, targets=labels)
        trained = [name for name, p in parallel.module.named_parameters() if p.grad is not None]
        return trained, sum(isinstance(module, QuantizedLinear) for module in parallel.module.modules())

    for trained, count in run_ranks(2, body):
        assert count == 14 and len(trained) == 8 and all("lora" in name for name in trained)
    model = source_of_run(config.model).build("meta")  # what `explain` sees
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
    assert sum(p.requires_grad for p in model.parameters()) == 8


def test_a_run_without_peft_is_refused(tmp_path, monkeypatch):
    tiny_model("llama").config.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LaunchError) as error:
        source_of_run(config_of(tmp_path).model)
    assert error.value.slugs == ("no-peft",)


def test_mistakes_of_the_file_are_named(tmp_path):
    with pytest.raises(LaunchError, match="whose weights are drawn") as error:
        config_of(tmp_path, FILE.replace("initialize: {folder}", "initialize: 3"))
    assert error.value.slugs == ("missing-key",)
    with pytest.raises(LaunchError) as error:
        config_of(tmp_path, FILE.replace("nf4(block=16)", "nf5"))
    assert error.value.slugs == ("unknown-format",)
    pytest.importorskip("peft")
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises((LaunchError, ModelError)) as error:
        source_of_run(config_of(tmp_path, FILE.replace("r: 4", "rank: 4")).model)
    assert error.value.slugs == ("bad-adapters",)
