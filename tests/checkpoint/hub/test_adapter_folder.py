"""Adapters of a model on a mesh are saved as PEFT saves those of the unsharded model, byte for byte, and load in
both."""

from __future__ import annotations

import copy
import json
from math import prod

import pytest
import torch

from parallelize import build_mesh, parallelize_model, parallelize_module, save_adapter
from parallelize.base.errors import CheckpointError
from tests.axes.tensor.install.adapted_models import adapted_model, config
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

MESHES = {
    "tp": ({"tp": 2}, {"sequence_parallel": True}),
    "zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "stages": ({"pp": 2, "dp": 2}, {"zero": 1}),
    "ep": ({"tp": 2}, {"ep": 2}),
    "folded": ({"dp": 4}, {"zero": 2, "ep": 4}),
}
FILES = ("adapter_model.safetensors", "adapter_config.json")


@pytest.mark.variants(every=1)
@pytest.mark.parametrize(
    ("mesh", "kind", "family"),
    [
        ("tp", "embedding", "llama"),
        ("tp", "copies", "llama"),
        ("tp", "every bias", "qwen2"),
        ("zero3", "every bias", "qwen2"),
        ("stages", "embedding", "llama"),
        ("stages", "copies", "llama"),
        ("stages", "every bias", "qwen2"),
        pytest.param("ep", "experts", "gpt_oss", marks=pytest.mark.sweep),
        ("folded", "experts", "mixtral"),
    ],
)
def test_saved_alike(mesh, kind, family, tmp_path):
    axes, options = MESHES[mesh]
    model = adapted_model(family, kind, torch.float32)
    model.save_pretrained(tmp_path / "stock")
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), **options)
        if mesh == "stages" and kind == "copies":
            with pytest.raises(CheckpointError) as error:
                save_adapter(parallel, tmp_path / "planned")
            assert error.value.slugs == ("unsavable-adapter",) and not (tmp_path / "planned").exists()
        else:
            save_adapter(parallel, tmp_path / "planned")

    run_ranks(len(models), body)
    if (tmp_path / "planned").exists():
        weights, configs = ([tmp_path / of / file for of in ("planned", "stock")] for file in FILES)
        assert weights[0].read_bytes() == weights[1].read_bytes()
        written, stock = (json.loads(path.read_text()) for path in configs)
        # PEFT writes sets in any order
        assert {k: sorted(v) if isinstance(v, list) else v for k, v in written.items()} == {
            k: sorted(v) if isinstance(v, list) else v for k, v in stock.items()
        }


def test_loaded_before_and_after_the_plan(tmp_path):
    model = adapted_model("llama", "embedding").eval()
    model.save_pretrained(tmp_path / "stock")
    stock = tiny_model("llama", torch.float64)
    ids = tiny_batch(67)[0]
    with torch.no_grad():
        expected = model(input_ids=ids).logits

    def later(rank):
        planned = parallelize_module(copy.deepcopy(stock), build_mesh("cpu", tp=2))
        return peft.PeftModel.from_pretrained(planned, tmp_path / "stock").eval()

    def earlier(rank):
        planned = peft.get_peft_model(copy.deepcopy(stock), config("embedding"))
        parallelize_module(planned, build_mesh("cpu", tp=2))
        planned.load_adapter(tmp_path / "stock", "default")
        return planned.eval()

    def body(rank):
        with torch.no_grad():
            return [make(rank)(input_ids=ids).logits for make in (later, earlier)]

    for results in run_ranks(2, body):
        for actual in results:
            assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()


def test_refusals(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    models = [tiny_model("llama"), adapted_model("llama", "lora")]

    def body(rank):
        slugs = []
        for model, name in zip(models, ("empty", "full"), strict=True):
            with pytest.raises(CheckpointError) as error:
                save_adapter(model, tmp_path / name)
            slugs += error.value.slugs
        return slugs

    assert run_ranks(1, body) == [["no-adapters", "folder-not-empty"]]
