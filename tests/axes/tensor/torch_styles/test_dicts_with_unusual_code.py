"""Dicts on models whose code does more with a value than pass it on: exact, as plans or as PyTorch applies them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from parallelize import (
    PlanError,
    build_mesh,
    cut_pipeline,
    parallelize_model,
    parallelize_module,
    recompute,
    recomputed,
    shard_data,
)
from parallelize.axes.tensor.torch_styles.lowering import read_by_code
from parallelize.state.records import resolution_of
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

GATHER: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
GATHER_FIRST: dict[str, Any] = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}


def linears(module: nn.Module, *names: str) -> None:
    for name in names:
        setattr(module, name, nn.Linear(8, 8, bias=name.endswith("2")))


class Block(nn.Module):
    """Its linears are w1 and w2."""

    def __init__(self):
        super().__init__()
        linears(self, "w1", "w2")
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.free = nn.Parameter(torch.randn(1, 4, 8))


class OtherInput(Block):
    def forward(self, x, c):
        return self.w2(F.silu(self.w1(x)) * F.silu(self.w1(c)))


class Helper(Block):
    def bias(self):
        return self.w1(self.free)

    def forward(self, x, c):
        return self.w2(F.silu(self.w1(x) + self.bias()))


def residual(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def decorated(self, x, c):
        return x + forward(self, x, c)

    return decorated


class Decorated(Block):
    @residual
    def forward(self, x, c):
        return self.w2(F.silu(self.w1(x)))


class Added(Block):
    def forward(self, x, c):
        h = self.norm(x)
        h += self.other(x)
        return self.w2(F.silu(self.w1(h)))


class Normed(Block):
    def forward(self, x, c):
        return self.w2(F.silu(self.w1(self.norm(x))))


class Outer(nn.Module):
    """A block between a scattering linear and a gathering one: x is full, the block sees sequence shards."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), block, nn.Linear(8, 8)

    def forward(self, x, c):
        return self.last(self.block(self.first(x), c))


ENDS = {
    "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
INNER = {"block.w1": ColwiseParallel(), "block.w2": RowwiseParallel(output_layouts=Shard(1))}
NORMS = {"block.norm": SequenceParallel(), "block.other": SequenceParallel()}
SHARDED = {**INNER, "block.w1": ColwiseParallel(input_layouts=Shard(1))}
EXAMPLES = {
    "a linear with two inputs": (OtherInput, {"block": PrepareModuleInput(**GATHER_FIRST), **INNER}),
    "a linear called by a helper": (Helper, {"block": PrepareModuleInput(**GATHER_FIRST), **INNER}),
    "a norm for a linear of a full input": (Normed, {**NORMS, **INNER}),
    "a norm for a linear that gathers": (Normed, {**NORMS, **SHARDED}),
    "an addition in place": (Added, {**NORMS, **SHARDED}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_exact(name):
    block, styles = EXAMPLES[name]
    torch.manual_seed(1)
    reference = Outer(block()).double()
    x, c = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    weights = torch.randn(2, 4, 8, dtype=torch.float64)
    initial = copy.deepcopy(reference)

    def gradients(model: nn.Module, other: torch.Tensor) -> dict[str, torch.Tensor]:
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        named |= {} if other.grad is None else {"input": other.grad}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in named.items()}

    c_reference = c.clone().requires_grad_()
    expected_out = reference(x, c_reference)
    (expected_out * weights).sum().backward()
    expected = gradients(reference, c_reference)

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        parallelize_module(model, build_mesh("cpu", tp=2), ENDS | styles)
        c_local = c.clone().requires_grad_()
        out = model(x, c_local)
        (out * weights).sum().backward()
        assert (out - expected_out).abs().max() < 1e-12
        actual = gradients(model, c_local)
        assert worst(actual, {n: expected[n] for n in actual})[0] < 1e-12 and set(actual) == set(expected)

    run_ranks(2, body)


def test_what_a_decorator_reads_is_not_taken_for_unread():
    initial = Outer(Decorated())

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        parallelize_module(model, build_mesh("cpu", tp=2), ENDS | INNER | {"block": PrepareModuleInput(**GATHER_FIRST)})
        assert [rule.pattern for rule in read_by_code(resolution_of(model).plan)] == ["block"]

    run_ranks(2, body)


def test_names_without_the_prefix_of_the_model_s_plan():
    """Submodules of `transformers` have the config of the full model, whose plan begins with another name."""

    initial = tiny_model("llama")

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", tp=2), copy.deepcopy(initial)
        parallelize_module(model.model, mesh, {"layers.0.mlp.gate_proj": ColwiseParallel()})
        parallelize_module(model.model.layers[1].mlp, mesh, {"gate_proj": ColwiseParallel()})
        for layer in model.model.layers:
            assert isinstance(layer.mlp.gate_proj.weight, DTensor)

    run_ranks(2, body)


class OwnNorm(SequenceParallel):
    """A third party's, which is no rule."""


@pytest.mark.parametrize("zero", [0, 2])
def test_styles_without_rules_under_data_axes(zero):
    """The gradient of a norm is summed over tp, and over dp, in the same step."""
    torch.manual_seed(2)
    initial = Outer(Normed()).double()
    batch = torch.randn(4, 4, 8, dtype=torch.float64)
    styles = ENDS | SHARDED | {"block.norm": OwnNorm(sequence_dim=-2, use_local_output=True)}

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output * targets).sum()

    expected = copy.deepcopy(initial)
    (loss(expected(batch, batch), batch) / 4).backward()

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", dp=2, tp=2), copy.deepcopy(initial)
        parallel = parallelize_model(model, mesh, styles, zero=zero, loss=loss, count=lambda targets: len(targets))
        assert resolution_of(model).plan.unlowered_styles
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1.0)
        local = batch.chunk(2)[mesh.get_local_rank("dp")]
        parallel.step(local, local, targets=local)
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            full = p.full_tensor() if isinstance(p, DTensor) else p
            stepped = q - q.grad if q.grad is not None else q
            if not isinstance(p, DTensor) and name != "block.free" and "other" not in name:
                continue  # a gradient of a parameter that no style names is not summed over tp
            assert (full - stepped).abs().max() < 1e-12, name

    run_ranks(4, body)


def test_two_dicts_on_one_model():
    torch.manual_seed(3)
    initial = Normed().double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    expected = initial(x, x)

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", tp=2), copy.deepcopy(initial)
        parallelize_module(model, mesh, {"w1": ColwiseParallel()})
        parallelize_module(model, mesh, {"w2": RowwiseParallel()})
        assert (model(x, x) - expected).abs().max() < 1e-12

    run_ranks(2, body)


def test_a_style_named_by_another_name_of_its_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(x)

    initial = Twice()

    def body(rank: int) -> None:
        style = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=2), {"b": style})
        assert model(torch.randn(2, 3, 8)).shape == (2, 6, 8)

    run_ranks(2, body)


def test_the_head_is_the_last_linear_of_the_vocabulary():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(30, 8), nn.Embedding(8, 8)
            self.project, self.head = nn.Linear(8, 8), nn.Linear(8, 30)

        def forward(self, ids):
            return self.head(torch.softmax(self.project(self.tokens(ids)), -1))

    initial = Positions()

    def body(rank: int) -> None:
        gathered = ColwiseParallel(output_layouts=Replicate())
        styles = {"tokens": gathered, "project": gathered, "head": gathered}
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=2), styles, loss_parallel=True)
        heads = [rule.pattern for rule in resolution_of(model).plan.rules if "head" in rule.style.options]
        assert heads == ["head"]
        assert model(torch.tensor([[1, 2]])).shape == (1, 2, 30)

    run_ranks(2, body)


def test_zero_3_gathers_layers_with_a_dict_too():
    initial = tiny_model("llama", torch.float32)

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", dp=2, tp=2), copy.deepcopy(initial)
        styles = {"model.layers.*.mlp.gate_proj": ColwiseParallel(output_layouts=Replicate())}
        parallelize_model(model, mesh, styles, zero=3)
        assert resolution_of(model).zero_units == ("model.layers.0", "model.layers.1")

    run_ranks(4, body)


def test_steps_see_modules_that_were_added_in_between():
    initial, added = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", dp=1, tp=2), copy.deepcopy(initial)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model.append(copy.deepcopy(added))
        recompute(model, units=["2"])
        assert list(recomputed(model)) == ["2"]
        shard_data(model, mesh, 0)

    run_ranks(2, body)


def test_a_model_without_layers_cannot_be_cut_for_one_rank_either():
    def body(rank: int) -> None:
        with pytest.raises(PlanError, match="no-layers"):
            cut_pipeline(nn.Linear(2, 2), build_mesh("cpu", pp=1, tp=2))

    run_ranks(2, body)


class ViewingAttention(nn.Module):
    """Views of its projections by the full number of heads, which are right for DTensors."""

    def __init__(self):
        super().__init__()
        linears(self, "wq", "wk", "wv", "wo")

    def forward(self, x):
        q, k, v = (w(x).view(*x.shape[:2], 4, 2).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.wo(out.transpose(1, 2).reshape(x.shape))


def test_projections_that_return_dtensors():
    torch.manual_seed(4)
    initial = ViewingAttention().double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    reference = copy.deepcopy(initial)
    expected_out = reference(x)
    expected_out.square().sum().backward()

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        styles = {name: ColwiseParallel(use_local_output=False) for name in ("wq", "wk", "wv")}
        parallelize_module(model, build_mesh("cpu", tp=2), styles | {"wo": RowwiseParallel()})
        assert not resolution_of(model).plan.unlowered_styles
        out = model(x)
        out.square().sum().backward()
        assert (out - expected_out).abs().max() < 1e-12
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        assert worst(gradients, {name: p.grad for name, p in reference.named_parameters()})[0] < 1e-12

    run_ranks(2, body)


def test_a_norm_that_is_called_by_keyword():
    class Norm(nn.LayerNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm(8)

        def forward(self, x):
            return self.norm(hidden_states=x)

    initial, x = Model(), torch.randn(2, 4, 8)

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        parallelize_module(model, build_mesh("cpu", tp=2), {"norm": SequenceParallel(use_local_output=True)})
        assert torch.equal(model(x), initial(x))

    run_ranks(2, body)
