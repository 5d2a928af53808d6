"""Adapters that PEFT adds to a parallel model: what cannot be added or merged is named, and a frozen one has no
gradient."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, full_gradients, parallelize_model, shard_data
from tests.axes.tensor.install.adapted_models import config
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS = tiny_batch(67, seed=1)[0]
LOCK = threading.Lock()  # ranks are threads with one default generator


def adapted(parallel, kind="lora"):
    with LOCK:
        return peft.get_peft_model(parallel.module, config(kind))


def on_mesh(axes, zero):
    with LOCK:
        model = tiny_model("llama", torch.float64).eval()
    return parallelize_model(model, build_mesh("cpu", **axes), zero=zero)


def test_what_cannot_be_added_over_data_axes_is_named():
    def body(rank):
        parallel = on_mesh({"dp": 2, "tp": 2}, 1)
        adapted(parallel, "copies")
        with pytest.raises(ModelError, match=r"was copied, on a mesh with data axes") as error:
            parallel.optimizer(torch.optim.AdamW)
        return error.value.slugs

    assert set(run_ranks(4, body)) == {("added-parameter",)}


def test_adapters_that_zero_3_has_in_full_are_not_merged_into_rows():
    def body(rank):
        with pytest.raises(ModelError, match=r"save_adapter.*then merge in one process") as error:
            adapted(on_mesh({"dp": 2}, 3)).merge_adapter()
        return error.value.slugs

    assert run_ranks(2, body) == [("unplanned-adapter",)] * 2


def test_a_second_adapter_leaves_the_first_one_frozen_over_data_ranks():
    """The first adapter was never seen by a forward while it trained."""

    def body(rank):
        model = adapted(on_mesh({"dp": 2}, 1))
        with LOCK:
            model.add_adapter("second", config("lora"))
        for name in ("second", "default"):
            model.set_adapter(name)
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
        return sum(parameter.grad is not None for parameter in model.parameters())

    counts = run_ranks(2, body)
    assert counts[0] == counts[1] > 0


def test_generation_by_a_wrapper_that_was_planned_over_zero_3():
    """It calls the model inside of the one that gathers what is in no unit."""
    alone = peft.get_peft_model(tiny_model("llama", torch.float64), config("lora")).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = alone.generate(input_ids=IDS, **options)
    copies = [copy.deepcopy(alone) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(copies[rank], build_mesh("cpu", dp=2), zero=3)
        return parallel.module.generate(input_ids=IDS, **options)

    assert all(torch.equal(tokens, expected) for tokens in run_ranks(2, body))


@pytest.mark.parametrize(("axes", "zero", "slug"), [({"cp": 2}, 0, "outside-context")])
def test_generation_by_a_wrapper_that_was_planned_is_refused(axes, zero, slug):
    """It calls the model inside of the one that divides sequences."""

    def body(rank):
        with LOCK:
            model = peft.get_peft_model(tiny_model("llama", torch.float64), config("lora")).eval()
        parallel = parallelize_model(model, build_mesh("cpu", **axes), zero=zero)
        with pytest.raises(ModelError) as error:
            parallel.module.generate(input_ids=IDS, max_new_tokens=2)
        return error.value.slugs

    assert run_ranks(2, body) == [(slug,)] * 2


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_adapters_of_ones_own_model_need_no_plan_over_data_axes(zero):
    """No rule says how their layers are split, because nothing splits them."""

    def build():
        torch.manual_seed(3)
        net = nn.Sequential(OrderedDict(up=nn.Linear(8, 12), act=nn.Tanh(), down=nn.Linear(12, 8))).double()
        with LOCK:
            return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))

    reference, rows = build(), torch.randn(4, 8, dtype=torch.float64)
    reference(rows).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    models = [build() for _ in range(2)]

    def body(rank):
        model = shard_data(models[rank], build_mesh("cpu", dp=2), zero=zero)
        model(rows.chunk(2)[rank]).square().sum().backward()
        return full_gradients(model)

    for own in run_ranks(2, body):
        assert own.keys() == expected.keys()
        assert all((own[name] - gradient).abs().max() < 1e-12 for name, gradient in expected.items())
