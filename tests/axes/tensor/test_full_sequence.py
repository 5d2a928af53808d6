"""The style `full_sequence`: a module that mixes tokens runs on all of them on every rank, inside the sequence-parallel
region."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_model, parallelize_module, recompute
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.plan.styles.contract import Conversion
from parallelize.state.randomness.dropout.install import install_dropout
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks

PLAN = parse_plan("""
schema_version: 1
sequence_parallel: {layers: layers, leave: norm}
tensor_parallel:
  layers.*:
    norm: sequence
    mixer: full_sequence(x)
    mixer.inner: replicate
    mixer.up: colwise
    mixer.down: rowwise
  norm: sequence
""")


class Mixer(nn.Module):
    """A running mean over tokens, with a parameter of its own, a replicated linear and two that are split."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.inner, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, state=None):
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        mean = (self.inner(x) * self.scale).cumsum(1) / steps
        return self.down(self.up(self.drop(mean)).tanh()), state


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(6), Mixer()

    def forward(self, x):
        return x + self.mixer(state=3, x=self.norm(x))[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Layer(), Layer()]), nn.LayerNorm(6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def step(model, x, target):
    out = model(x)
    (out - target).square().sum().backward()
    return out.detach()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_the_unsharded_model(sequence_parallel, length, recomputed):
    """With dropout between the mixer's parts, whose mask is the same on each rank, and a length that ranks share
    unevenly."""
    torch.manual_seed(0)
    model = Net().double()
    x, target = torch.randn(2, 2, length, 6, dtype=torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]
    install_dropout(model, 5)
    expected = {"out": step(model, x, target), **{n: p.grad for n, p in model.named_parameters()}}

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), PLAN, sequence_parallel=sequence_parallel)
        install_dropout(models[rank], 5)
        if recomputed:
            recompute(models[rank], units="layers.*")
        return {"out": step(models[rank], x, target), **full_gradients(models[rank])}

    for actual in run_ranks(2, body):
        assert worst(actual, expected)[0] <= 1e-12


def test_rules_inside_mean_what_they_mean_without_sequence_parallelism():
    resolved = resolve(PLAN, describe(Net()), MeshSpec(tp=2), Options(sequence_parallel=True))
    contracts = {name: row.contract for name, row in resolved.modules.items()}
    mixer = contracts["layers.0.mixer"]
    assert (mixer.enter, mixer.leave) == (Conversion.LEAVE_REGION, Conversion.ENTER_REGION)
    assert contracts["layers.0.mixer.up"].enter is Conversion.COPY
    assert contracts["layers.0.mixer.down"].leave is Conversion.REDUCE
    partial = {name for name, row in resolved.parameters.items() if row.partial}
    assert partial == {
        f"{name}.{key}" for name in ("layers.0.norm", "layers.1.norm", "norm") for key in ("weight", "bias")
    }


@pytest.mark.parametrize("family", ["jamba", "lfm2_moe"])
def test_generation(family):
    """One token after another is not sharded, and the state of the mixers is the same on every rank."""
    model = tiny_model(family).eval()
    ids, _ = tiny_batch()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        return models[rank].generate(ids, max_new_tokens=4, do_sample=False)

    for actual in run_ranks(2, body):
        assert torch.equal(actual, expected)


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "jamba", "lfm2_moe", "minimax", "llama4_text"])
def test_in_a_pipeline_recomputed(family):
    """On pp x tp under sequence parallelism. The caches of `transformers` do not know of layers that are on other
    stages. Llama 4 reads the device of its embedding's weight on every stage."""
    model = tiny_model(family, torch.float64)
    ids, labels = tiny_batch(batch=4)
    models = [copy.deepcopy(model) for _ in range(4)]
    loss_of(model(input_ids=ids).logits, labels).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def body(rank):
        mesh = build_mesh("cpu", pp=2, tp=2)
        parallel = parallelize_model(models[rank], mesh, num_microbatches=2, sequence_parallel=True, recompute="full")
        parallel.step(ids, targets=labels, use_cache=False)
        return full_gradients(models[rank])

    results = run_ranks(4, body)
    assert {name for actual in results for name in actual} >= expected.keys()
    for actual in results:
        shared = actual.keys() & expected.keys()
        assert worst({n: actual[n] for n in shared}, {n: expected[n] for n in shared})[0] <= 1e-12
