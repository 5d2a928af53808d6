"""What puts other parameters into a model: accelerate's offload hooks, and the resizing of embeddings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from parallelize import (
    ColwiseParallel,
    ModelError,
    RowwiseParallel,
    build_mesh,
    parallelize_model,
    parallelize_module,
    shard_data,
)
from tests.support.models import tiny_batch, tiny_model
from tests.support.refused import small_mesh
from tests.support.threads import run_ranks

IDS, _ = tiny_batch()


class AlignDevicesHook:
    """As accelerate names what it keeps: a hook that loads parameters if it offloads, and else moves inputs alone."""

    def __init__(self, offload: bool):
        self.offload = offload


class SequentialHook:
    def __init__(self, *hooks: Any):
        self.hooks = hooks


def models(number: int = 2) -> list[Any]:
    model = tiny_model("llama", torch.float64)
    return [copy.deepcopy(model) for _ in range(number)]


ENTRANCES = {
    "parallelize_module": lambda model: parallelize_module(model, build_mesh("cpu", tp=2)),
    "a dict of styles": lambda model: parallelize_module(
        model, build_mesh("cpu", tp=2), {"model.layers.*.mlp.up_proj": ColwiseParallel(output_layouts=Replicate())}
    ),
    "parallelize_model": lambda model: parallelize_model(model, build_mesh("cpu", dp=2)),
    "shard_data": lambda model: shard_data(model, build_mesh("cpu", dp=2), zero=3),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_models_whose_parameters_are_loaded_for_each_forward_are_refused(entrance):
    copies = models()

    def body(rank: int) -> None:
        module = copies[rank].model.layers[1].mlp.up_proj
        before = copies[rank].state_dict()
        for hook in (AlignDevicesHook(True), SequentialHook(AlignDevicesHook(False), AlignDevicesHook(True))):
            module._hf_hook = hook
            with pytest.raises(ModelError, match=r"(?s)offloaded-parameters.*layers\.1\.mlp\.up_proj.*device_map"):
                ENTRANCES[entrance](copies[rank])
        assert all(
            value is before[name] or value.equal(before[name]) for name, value in copies[rank].state_dict().items()
        )
        module._hf_hook = SequentialHook(AlignDevicesHook(False))
        ENTRANCES[entrance](copies[rank])

    run_ranks(2, body)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_cannot_be_resized_is_refused(zero):
    copies, single = models(), models(1)[0]

    def body(rank: int) -> None:
        model = parallelize_model(copies[rank], build_mesh("cpu", dp=2), zero=zero).module
        for part in (model, model.model) if zero == 3 else (model.model,):
            with pytest.raises(ModelError, match=r"resume\(resize_vocabulary=True\)") as error:
                part.resize_token_embeddings(80)
            assert error.value.slugs == ("reads-full-parameters" if zero == 3 else "replaces-parameters",)

    run_ranks(2, body)
    single.resize_token_embeddings(80)


def test_float32_copies_are_not_rounded():
    copies = models()

    def body(rank: int) -> None:
        parallel = parallelize_model(copies[rank].float(), build_mesh("cpu", dp=2), zero=1, dtype="bfloat16")
        with pytest.raises(ModelError, match="replaces-parameters"):
            parallel.module.resize_token_embeddings(80)

    run_ranks(2, body)


@pytest.mark.parametrize(("axes", "zero"), [({"tp": 2}, 0), ({"dp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 2)], ids=str)
def test_an_optimizer_of_before_does_not_step(axes, zero):
    """Not on threads, where no object is looked for."""
    with small_mesh(**axes) as mesh:
        parallel = parallelize_model(models()[0], mesh, zero=zero)
        before, beside = (parallel.optimizer(torch.optim.SGD, part, lr=0.1) for part in (None, layers_of(parallel)))
        parallel.module.resize_token_embeddings(80, mean_resizing=False)
        with pytest.raises(ModelError, match="early-optimizer"):
            before.step()
        beside.step()  # has none of what was replaced


def layers_of(parallel):
    return [parameter for name, parameter in parallel.module.named_parameters() if ".layers." in name]


def test_resizing_around_a_part_that_has_a_plan():
    """Right where the part has no embedding and no head; else refused, by PyTorch."""
    copies = models()
    stock = copy.deepcopy(copies[0])
    with torch.no_grad():
        expected = stock(input_ids=IDS).logits
    size = expected.shape[-1]
    mlp = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parts = {
        "model.layers.0.mlp": mlp,
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }

    def body(rank: int) -> None:
        for part, styles in parts.items():
            model: nn.Module = copy.deepcopy(copies[rank])
            parallelize_module(model.get_submodule(part), build_mesh("cpu", tp=2), styles)
            if part == "model.layers.0.mlp":
                model.resize_token_embeddings(size + 16, mean_resizing=False)
                with torch.no_grad():
                    assert (model(input_ids=IDS).logits[..., :size] - expected).abs().max() < 1e-12
            else:
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    model.resize_token_embeddings(size + 16, mean_resizing=False)

    run_ranks(2, body)


def test_a_move_that_changes_nothing_is_none():
    """PyTorch replaces DTensors in every `.to()`, which nothing may refer to weakly then."""
    initial = tiny_model("llama")
    models = [copy.deepcopy(initial) for _ in range(4)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2, tp=2), zero=2)
        before = list(parallel.module.parameters())
        parallel.module.to("cpu")
        return all(a is b for a, b in zip(before, parallel.module.parameters(), strict=True))

    assert all(run_ranks(4, body))
