"""Muon on every mesh steps as `torch.optim.Muon` and `torch.optim.AdamW` step the unsharded model."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from parallelize import Muon, build_mesh, parallelize_model
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.comm.groups import Group
from parallelize.state.optimizers.matrices import matrices_of, matrix_names
from tests.state.optimizers import muon_jobs as jobs
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

MESHES = {
    "tp4": ({"tp": 4}, {}),
    "dp2tp2-zero1": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "dp2tp2-zero0": ({"dp": 2, "tp": 2}, {"zero": 0}),
    "dp2tp2-zero2": ({"dp": 2, "tp": 2}, {"zero": 2}),
    "dp2tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp2dp2-zero2": ({"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 2}),
    "dp4-zero3": ({"dp": 4}, {"zero": 3}),
    "dp2cp2-zero1": ({"dp": 2, "cp": 2}, {"zero": 1}),
}
EXPERT_MESHES = {
    "dp2tp2-zero1-ep2": ({"dp": 2, "tp": 2}, {"zero": 1, "ep": 2}),
    "dp4-zero3-ep2": ({"dp": 4}, {"zero": 3, "ep": 2}),
    "dp2tp2-zero0-ep2-etp2": ({"dp": 2, "tp": 2}, {"zero": 0, "ep": 2, "etp": 2}),
}
_BASES: dict[str, nn.Module] = {}


def base_of(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    key = f"{family} {dtype}"
    if key not in _BASES:
        _BASES[key] = tiny_model(family, dtype, **({"num_key_value_heads": 2} if family == "llama" else {}))
    return _BASES[key]


def trained_reference(base, max_norm=None):
    reference = jobs.Reference(base, max_norm)
    for ids, labels in jobs.batches():
        reference.step(ids, labels)
    return reference.weights()


def check_equal(actual, expected, base, tolerance=1e-12):
    assert set(actual) == set(expected)
    start = dict(base.named_parameters())
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max()
        assert error <= tolerance, (name, float(error))
        assert not torch.equal(value, start[name]) or "expert" in name, f"{name} was not stepped"


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_equals_that_of_the_unsharded_model(family, mesh):
    base, (axes, options) = base_of(family), MESHES[mesh]
    expected = trained_reference(base)
    for weights, _ in run_ranks(4, lambda rank: jobs.trained(rank, base, axes, options)):
        check_equal(weights, expected, base)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_each_expert_is_a_matrix(mesh):
    base, (axes, options) = base_of("mixtral"), EXPERT_MESHES[mesh]
    expected = trained_reference(base)
    for weights, _ in run_ranks(4, lambda rank: jobs.trained(rank, base, axes, options)):
        check_equal(weights, expected, base)


@pytest.mark.sweep
def test_clipped_gradients_give_the_same_steps():
    base, (axes, options) = base_of("llama"), MESHES["dp2tp2-zero1"]
    expected = trained_reference(base, 0.05)
    for weights, _ in run_ranks(4, lambda rank: jobs.trained(rank, base, axes, options, 0.05)):
        check_equal(weights, expected, base)


@pytest.mark.parametrize(
    ("axes", "options"), [MESHES["dp2tp2-zero1"], pytest.param(*MESHES["dp2tp2-zero3"], marks=pytest.mark.sweep)]
)
def test_the_same_gradients_give_the_same_bits(axes, options):
    base = base_of("llama", torch.float32)
    generator = torch.Generator().manual_seed(4)
    steps = [
        {n: torch.randn(p.shape, generator=generator) for n, p in base.named_parameters()} for _ in range(jobs.STEPS)
    ]
    reference = jobs.Reference(base)
    for gradients in steps:
        for name, parameter in reference.model.named_parameters():
            parameter.grad = gradients[name].clone()
        reference.update()

    def body(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), **options)
        optimizer = parallel.optimizer(Muon, **jobs.SETTINGS, **jobs.ADAM)
        for gradients in steps:
            jobs.set_gradients(parallel.module, gradients)
            optimizer.step()
        return jobs.full_weights(parallel)

    for weights in run_ranks(4, body):
        for name, value in reference.weights().items():
            assert torch.equal(weights[name], value), name


def test_bytes_are_at_most_twice_the_gradients(monkeypatch):
    base, stock, sent = base_of("llama", torch.float32), Group.all_to_all, []

    def counted(self, x, to_each, from_each):
        sent.append(sum(x.element_size() * n for rank, n in enumerate(to_each) if rank != self.rank))
        return stock(self, x, to_each, from_each)

    monkeypatch.setattr(Group, "all_to_all", counted)
    for axes, options in (MESHES["dp2tp2-zero0"], MESHES["dp2tp2-zero1"], MESHES["dp4-zero3"]):
        sent.clear()

        def body(rank, axes=axes, options=options):
            parallel = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), **options)
            optimizer = parallel.optimizer(Muon, lr=0.1)
            gradients = {n: torch.ones(p.shape) for n, p in base.named_parameters()}
            jobs.set_gradients(parallel.module, gradients)
            optimizer.step()
            matrices = optimizer.param_groups[0]["params"]
            return sum(plain_local(p.grad).numel() * 4 for p in matrices), optimizer.sent_bytes

        results = run_ranks(4, body)
        gradient_bytes, counted_bytes = (sum(column) for column in zip(*results, strict=True))
        assert len(sent) == 2 * 4 and sum(sent) == counted_bytes, "one exchange each way, on each of four ranks"
        assert 0 < counted_bytes <= 2 * gradient_bytes


@pytest.mark.parametrize("by", ["heads", pytest.param("chunks", marks=pytest.mark.sweep)])
def test_packed_weights_are_split_into_their_matrices(by):
    base = base_of("phi3", torch.float32)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    gradient = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) for n, p in base.named_parameters()}

    def body(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2, tp=2), zero=1)
        optimizer = parallel.optimizer(Muon, lr=0.1, weight_decay=0.0, split={"*qkv_proj.weight": by})
        jobs.set_gradients(parallel.module, gradient)
        optimizer.step()
        boxes = matrices_of(parallel.module, name, tuple(base.get_parameter(name).shape), {"*": by})
        return jobs.full_weights(parallel)[name], boxes

    for weight, boxes in run_ranks(4, body):
        heads = base.config.num_attention_heads + 2 * base.config.num_key_value_heads
        assert len(boxes) == (3 if by == "chunks" else heads)
        for (start, stop), _ in boxes:
            part = nn.Parameter(base.get_parameter(name).detach()[start:stop].clone())
            part.grad = gradient[name][start:stop].clone()
            torch.optim.Muon([part], lr=0.1, weight_decay=0.0).step()
            assert torch.equal(weight[start:stop], part.detach())


def test_embeddings_heads_and_biases_of_experts_are_no_matrices():
    for family, without in {"gpt_oss": ("bias", "embed", "lm_head", "sinks", "norm"), "gpt2": ("wte", "wpe")}.items():
        model = tiny_model(family)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        names = matrix_names(model, shapes)
        assert names and not [name for name in names if any(part in name for part in without)], names
    assert matrix_names(nn.Linear(3, 2), {"weight": (2, 3), "bias": (2,)}) == {"weight"}
