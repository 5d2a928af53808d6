"""Exported tensors are those of `save_pretrained` of the unsharded model, bit by bit, from every mesh."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallelize import build_mesh, parallelize_model
from parallelize.checkpoint.export.export_weights import export_weights
from tests.support.models import FAMILIES, MIXTURES, tiny_model
from tests.support.threads import run_ranks

DENSE = [family for family in FAMILIES if family not in MIXTURES]
MESHES = {
    "tp4": ({"tp": 4}, {}),
    "dp2tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp2tp2": ({"pp": 2, "tp": 2}, {}),
}
EXPERT_MESHES = {
    "dp4-zero3-ep2": ({"dp": 4}, {"zero": 3, "ep": 2}),
    "dp2tp2-zero1-ep2": ({"dp": 2, "tp": 2}, {"zero": 1, "ep": 2}),
    "pp2dp2-ep2": ({"pp": 2, "dp": 2}, {"zero": 0, "ep": 2}),
    "dp2cp2-ep2": ({"dp": 2, "cp": 2}, {"zero": 0, "ep": 2}),
}
WITHOUT_CONTEXT = ("qwen3_next", "qwen3_5_moe_text", "jamba", "lfm2_moe", "minimax", "nemotron_h", "gemma4_text")
WITHOUT_CONTEXT += ("granitemoehybrid",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> (model, tensors that `transformers` saves)."""
    known = {}

    def of(family):
        if family not in known:
            model = tiny_model(family, **({"num_key_value_heads": 2} if family == "llama" else {}))
            folder: Path = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            known[family] = (model, {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()})
        return known[family]

    return of


def exported(base, axes, options, **asked):
    """What each rank gets: name -> tensor. Under tp, the second rank asks for nothing."""

    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), **options)
        return {
            name: tensor.clone()
            for bucket in export_weights(model, bucket="20KB", receive="tp" not in axes or rank != 1, **asked)
            for name, tensor in bucket.tensors.items()
        }

    return run_ranks(4, body)


def check(tensors, expected, asked):
    if not asked:
        assert tensors == {}
        return
    assert list(tensors) and set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value), name


@pytest.mark.variants(every=32)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", DENSE)
def test_dense_families_are_exported_as_saved(saved, family, mesh):
    model, expected = saved(family)
    axes, options = MESHES[mesh]
    for rank, tensors in enumerate(exported(model, axes, options)):
        check(tensors, expected, "tp" not in axes or rank != 1)


@pytest.mark.variants(every=64)
@pytest.mark.parametrize("mesh", EXPERT_MESHES | {name: MESHES[name] for name in ("tp4", "dp2tp2-zero3")})
@pytest.mark.parametrize("family", MIXTURES)
def test_expert_families_are_exported_as_saved(saved, family, mesh):
    if "cp" in mesh and family in WITHOUT_CONTEXT:
        pytest.skip("the plan refuses this mesh by name")
    model, expected = saved(family)
    axes, options = (EXPERT_MESHES | MESHES)[mesh]
    for rank, tensors in enumerate(exported(model, axes, options)):
        check(tensors, expected, "tp" not in axes or rank != 1)
