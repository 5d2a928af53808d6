"""Adapters that PEFT adds to a parallel model, and merges before its next forward: planned when they are merged, on
every axis."""

from __future__ import annotations

import threading
import zlib

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.base.errors import ModelError
from tests.axes.tensor.install.adapted_models import config
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")
peft_layers = pytest.importorskip("peft.tuners.lora.layer")

IDS = tiny_batch(67, seed=1)[0]
LOCK = threading.Lock()  # ranks are threads with one default generator


def adapted(model):
    with LOCK:
        return filled(peft.get_peft_model(model, config("lora")))


def filled(model):
    """The model, whose adapters have values that depend on their names alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values.to(parameter.dtype) * 0.3)
    return model


def merged_for_good(model):
    return model.merge_and_unload()


def merged(model):
    model.merge_adapter()
    return model


def merged_and_not(model):
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def each_layer(model):
    for module in model.modules():
        if isinstance(module, peft_layers.LoraLayer):
            module.merge()
    return model


def of_the_second(model):
    with LOCK:
        model.add_adapter("second", config("lora"))
    model.set_adapter("second")
    return filled(model).merge_and_unload()


def unloaded(model):
    with model.disable_adapter():
        return model.unload()


USES = [merged_for_good, merged, merged_and_not, each_layer, of_the_second, unloaded]
MESHES = [({"tp": 2}, None), *(({"dp": 2}, zero) for zero in (0, 1, 2)), ({"dp": 2, "tp": 2}, 1)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def parallel(axes: dict[str, int], zero: int | None):
    with LOCK:
        model = tiny_model("llama", torch.float64).eval()
    return parallelize_model(model, build_mesh("cpu", **axes), **({} if zero is None else {"zero": zero})).module


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("axes", "zero"), MESHES, ids=str)
def test_adapters_are_merged_as_on_one_process(axes, zero, use):
    expected = logits(use(adapted(tiny_model("llama", torch.float64).eval())))
    size = 2 if len(axes) == 1 else 4
    for actual in run_ranks(size, lambda rank: logits(use(adapted(parallel(axes, zero))))):
        assert (actual - expected).abs().max() / expected.abs().max() < 1e-12


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("use", USES)
def test_each_stage_merges_what_it_has(use):
    expected = dict(use(adapted(tiny_model("llama", torch.float64).eval())).named_parameters())
    stages = run_ranks(2, lambda rank: dict(use(adapted(parallel({"pp": 2}, None))).named_parameters()))
    own = [{name: value for name, value in stage.items() if value.numel()} for stage in stages]
    assert expected.keys() == {name for stage in own for name in stage}
    assert all((value - expected[name]).abs().max() < 1e-12 for stage in own for name, value in stage.items())


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("use", USES[:5])
def test_adapters_that_zero_3_has_in_full_are_not_merged_into_rows(use):
    def body(rank: int) -> None:
        model = adapted(parallel({"dp": 2}, 3))
        with pytest.raises(ModelError, match=r"save_adapter.*then merge in one process") as error:
            use(model)
        assert error.value.slugs == ("unplanned-adapter",)

    run_ranks(2, body)


def test_a_second_adapter_leaves_the_first_one_frozen_over_data_ranks():
    """The first adapter was never seen by a forward while it trained."""

    def body(rank: int) -> int:
        model = adapted(parallel({"dp": 2}, 1))
        with LOCK:
            model.add_adapter("second", config("lora"))
        model.set_adapter("second")
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
        model.set_adapter("default")
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
        return sum(parameter.grad is not None for parameter in model.parameters())

    counts = run_ranks(2, body)
    assert counts[0] == counts[1] > 0
