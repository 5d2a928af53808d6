"""Linears that compute in float8 from weights that train: split as others are, each rank with the scales of its
shards."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from parallelize import ModelError, build_mesh, full_gradients, parallelize_model, parallelize_module, verify
from tests.state.quantization.float8_linears import Float8Linear, in_float8, on_shards
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
ROWS = ("o_proj", "down_proj")


def gradients(model, ids, labels):
    loss = loss_of(model(input_ids=ids, use_cache=False).logits, labels)
    loss.backward()
    return {name.replace(".whole", ""): p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}


def on_ranks(model, ranks, ids, labels, **options):
    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=ranks), trace=True, **options)
        loss = loss_of(planned(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        return full_gradients(planned) | {"loss": loss.detach()}

    return run_ranks(ranks, body)


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"sequence_parallel": True, "loss_parallel": True}),
        pytest.param("qwen2", 2, {"sequence_parallel": True}, marks=pytest.mark.sweep, id="with biases"),
    ],
)
def test_ranks_compute_what_their_shards_are(family, ranks, options):
    model = in_float8(tiny_model(family, torch.float64, **SIZES))
    ids, labels = tiny_batch(batch=2, length=8)
    expected = gradients(on_shards(model, ranks, ROWS), ids, labels)
    for actual in on_ranks(model, ranks, ids, labels, **options):
        assert worst(actual, expected)[0] < 1e-10


def test_shards_round_no_more_than_the_full_weight():
    plain = tiny_model("llama", torch.float64, **SIZES)
    ids, labels = tiny_batch(batch=2, length=8)
    exact = gradients(copy.deepcopy(plain), ids, labels)
    model = in_float8(plain)
    unsharded = gradients(copy.deepcopy(model), ids, labels)
    for sharded in on_ranks(model, 2, ids, labels):
        assert _distance(sharded, exact) < 1.1 * _distance(unsharded, exact)


def _distance(a, b) -> float:
    """The root of the mean, over tensors, of squared errors over squared values."""
    return float(sum((a[name] - b[name]).square().sum() / b[name].square().sum() for name in b) / len(b)) ** 0.5


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_step_on_a_mesh_is_that_of_tensor_parallelism_alone(zero):
    model = in_float8(tiny_model("llama", torch.float64, **SIZES))
    ids, targets = tiny_batch(batch=2, length=8)
    first, second = (gradients(on_shards(model, 2, ROWS), ids[n : n + 1], targets[n : n + 1]) for n in range(2))
    share = int((targets[0] >= 0).sum()) / int((targets >= 0).sum())  # of the tokens with a target
    expected = {name: share * first[name] + (1 - share) * second[name] for name in first}

    def body(rank):
        mesh = build_mesh("cpu", dp=2, tp=2)
        parallel = parallelize_model(copy.deepcopy(model), mesh, zero=zero, sequence_parallel=True)
        row = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
        loss = parallel.step(ids[row], targets=targets[row])
        return full_gradients(parallel.module) | {"loss": loss}

    for actual in run_ranks(4, body):
        assert worst(actual, expected)[0] < 1e-10


@pytest.mark.sweep
def test_a_comparison_of_numbers_leaves_float8_out():
    assert verify(lambda: in_float8(tiny_model("llama", **SIZES)), "llama", "tp=2").ok


def test_widths_that_the_matmul_does_not_take_on_a_rank():
    model = in_float8(tiny_model("llama", **(SIZES | {"intermediate_size": 48})))
    with small_mesh(tp=2) as mesh, refused(ModelError, "float8-width", "24 of 48", "mlp.gate_proj"):
        parallelize_module(model, mesh)
    for linear in model.modules():
        if isinstance(linear, Float8Linear):
            linear.config = SimpleNamespace(emulate=True)
    with small_mesh(tp=2) as mesh:
        parallelize_module(model, mesh)


def test_weights_that_fully_shard_would_gather_in_float8():
    class WeightWithDynamicFloat8CastTensor(torch.nn.Parameter):
        __module__ = "torchao.float8.fsdp_utils"

    model = in_float8(tiny_model("llama", **SIZES))
    linear = model.model.layers[0].mlp.up_proj
    linear._parameters["weight"] = WeightWithDynamicFloat8CastTensor(linear.weight.data)
    with small_mesh(tp=2) as mesh, refused(ModelError, "other-quantizer", "enable_fsdp_float8_all_gather=False"):
        parallelize_module(model, mesh)


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_linears_of_torchao_itself(recipe):
    float8 = pytest.importorskip("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert = partial(float8.float8_linear.Float8Linear.from_float, config=config)
    model = in_float8(tiny_model("llama", torch.float64, **SIZES), convert)
    ids, labels = tiny_batch(batch=2, length=8)
    expected = gradients(on_shards(model, 2, ROWS), ids, labels)
    for options in ({}, {"sequence_parallel": True}):
        for actual in on_ranks(model, 2, ids, labels, **options):
            assert worst(actual, expected)[0] < 1e-6  # scales are float32
