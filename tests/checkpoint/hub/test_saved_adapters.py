"""Folders and exports of models with adapters are of the stock model, with what is merged; what is not merged is
refused."""

from __future__ import annotations

import copy
import json
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from parallelize import build_mesh, export_weights, load_pretrained, parallelize_model, save_pretrained
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.export.export_weights import WeightExporter
from tests.axes.tensor.install.adapted_models import adapted_model
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

MESHES = {
    "tp": ({"tp": 2}, {}),
    "ZeRO 1": ({"dp": 2}, {"zero": 1}),
    "ZeRO 3": ({"dp": 2}, {"zero": 3}),
    "pp": ({"pp": 2}, {"num_microbatches": 2}),
    "dp x tp, ZeRO 3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}


def exported(parallel):
    return {name: tensor.clone() for bucket in export_weights(parallel) for name, tensor in bucket.tensors.items()}


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("kind", ["lora", "copies", "ia3", "tokens"])
@pytest.mark.parametrize("mesh", MESHES)
def test_merged_adapters_are_written_as_the_merged_stock_model(tmp_path, mesh, kind):
    axes, options = MESHES[mesh]
    if kind == "tokens" and mesh != "ZeRO 1":
        pytest.skip("the plan refuses rows of an embedding over tp, and PEFT does not merge them into DTensors")
    model = adapted_model("llama", kind)
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "stock")
    want = load_file(tmp_path / "stock" / "model.safetensors")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", **axes), **options)
        for _ in range(1 if kind == "ia3" else 2):  # what IA3 unmerges is another weight
            for write in (exported, lambda model: save_pretrained(model, tmp_path / "refused")):
                with refused(CheckpointError, "unmerged-adapters", "merge_adapter", "save_adapter"):
                    write(parallel)
            parallel.module.merge_adapter()
            merged = exported(parallel)
            assert worst(merged, want)[0] < 1e-12 and list(merged) == list(exported(parallel))
            if not (tmp_path / "merged").exists():
                save_pretrained(parallel, tmp_path / "merged")
            parallel.module.unmerge_adapter()

    run_ranks(prod(axes.values()), body)
    assert worst(load_file(tmp_path / "merged" / "model.safetensors"), want)[0] < 1e-12
    architectures = (
        json.loads((tmp_path / each / "config.json").read_text())["architectures"] for each in ("merged", "stock")
    )
    assert list(architectures) == [["LlamaForCausalLM"]] * 2


def test_disabled_adapters_leave_the_stock_model():
    model, base = adapted_model("llama", "copies"), tiny_model("llama", torch.float64).state_dict()

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", tp=2))
        exporter = WeightExporter(parallel)
        with parallel.module.disable_adapter():
            assert worst(exported(parallel), base)[0] == 0
            with refused(CheckpointError, "stale-exporter"):  # it was built for the trained copies
                next(iter(exporter.export()))
        exporter.close()

    run_ranks(2, body)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_base_is_loaded_beside_adapters_at_each_stage(tmp_path, zero):
    tiny_model("llama", torch.float64, seed=5).save_pretrained(tmp_path)
    model = adapted_model("llama", "lora")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=2), zero=zero)
        load_pretrained(parallel, tmp_path)
        with parallel.module.disable_adapter():
            assert worst(exported(parallel), load_file(tmp_path / "model.safetensors"))[0] == 0

    run_ranks(2, body)
