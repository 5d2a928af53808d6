"""Styles that PyTorch's own classes apply, alone or beside rules: gradients, clipping and steps of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as stock
from transformers.pytorch_utils import Conv1D

from parallelize import (
    SequenceParallel,
    build_mesh,
    full_gradients,
    full_parameter,
    parallelize_model,
    parallelize_module,
)
from parallelize.state.records import resolution_of
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

WIDTH, VOCAB = 8, 21  # of which tp=2 divides one


class Row(stock.RowwiseParallel):
    """A third party's: what PyTorch's class does, and no rule."""


class Column(stock.ColwiseParallel):
    pass


class Norm(stock.SequenceParallel):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def styles(row: Any, column: Any, norm: Any) -> dict[str, Any]:
    scattered = row(output_layouts=Shard(1))
    return {
        "table": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": norm(),
        "layers.*.up": column(input_layouts=Shard(1)),
        "layers.*.down": scattered,
        "norm": norm(),
        "head": column(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def beside_rules() -> dict[str, Any]:
    gather = stock.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    split = stock.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    plan = styles(stock.RowwiseParallel, stock.ColwiseParallel, stock.SequenceParallel)
    plan |= {"layers.*.down": Row(output_layouts=Shard(1)), "layers.1": gather, "norm": split}
    return plan | {"nor?": stock.SequenceParallel(sequence_dim=-2)}


DICTS = {"all": lambda: styles(Row, Column, Norm), "beside rules": beside_rules}
IDS = torch.arange(32).view(4, 8) * 5 % VOCAB


def initial_model() -> nn.Module:
    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("name", DICTS)
@pytest.mark.parametrize(
    ("axes", "zero"), [({"dp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3), ({"pp": 2}, 0)], ids=str
)
def test_clipped_steps_are_those_of_one_process(name, axes, zero):
    initial = initial_model()
    expected, norms = copy.deepcopy(initial), []
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        (loss_sum(expected(IDS), IDS.roll(1, 1)) / IDS.numel()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.5)))
        optimizer.step()

    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", **axes, tp=2), copy.deepcopy(initial)
        options = {"loss": loss_sum, "count": torch.numel, "num_microbatches": axes.get("pp", 1)}
        parallel = parallelize_model(model, mesh, DICTS[name](), zero=zero, **options)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1.0)
        ids = IDS.chunk(2)[mesh.get_local_rank("dp")] if "dp" in axes else IDS
        for norm in norms:
            parallel.step(ids, targets=ids.roll(1, 1))
            assert abs(float(parallel.clip_grad_norm_(0.5)) - norm) < 1e-12
            optimizer.step()
            optimizer.zero_grad()
        full = {key: full_parameter(model, key, parameter) for key, parameter in model.named_parameters()}
        assert worst(full, {key: expected.get_parameter(key) for key in full})[0] < 1e-12

    run_ranks(4, body)


def test_gradients_of_a_copy_and_of_its_second_backward():
    initial = initial_model()
    for _ in range(2):
        loss_sum(initial(IDS), IDS).backward()
    expected = {name: parameter.grad for name, parameter in initial.named_parameters()}
    models = [initial_model() for _ in range(2)]

    def body(rank: int) -> None:
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), DICTS["all"]())
        for each in (copy.deepcopy(model), model):
            for _ in range(2):
                loss_sum(each(IDS), IDS).backward()
            placements = [(p.grad.placements, p.placements) for p in each.parameters()]
            assert all(gradient == parameter for gradient, parameter in placements)
            assert worst(full_gradients(each), expected)[0] < 1e-12

    run_ranks(2, body)


LAYOUTS = {
    "partial input": (stock.ColwiseParallel, {"input_layouts": Partial()}),
    "features as input": (stock.ColwiseParallel, {"input_layouts": Shard(-1)}),
    "rows as output": (stock.ColwiseParallel, {"output_layouts": Shard(1)}),
    "rows as input": (stock.RowwiseParallel, {"input_layouts": Shard(0)}),
    "features as output": (stock.RowwiseParallel, {"output_layouts": Shard(-1)}),
    "rows from the end": (stock.RowwiseParallel, {"output_layouts": Shard(-2)}),
}


@pytest.mark.parametrize("in_second_dict", [False, True], ids=["one dict", "second dict"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("linear", [lambda: nn.Linear(8, 9), lambda: Conv1D(9, 8)], ids=["linear", "conv1d"])
def test_layouts_that_no_rule_has(linear, layout, in_second_dict):
    """A linear is computed by a rule, of `transformers` too, which PyTorch's classes refuse."""
    torch.manual_seed(0)
    stock_model = nn.Sequential(linear(), nn.Linear(9, 8)).double()
    x = torch.randn(4, 5, 8).double()
    style, layouts = LAYOUTS[layout]
    expected = stock_model(x)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    gradients = {name: p.grad for name, p in stock_model.named_parameters()}
    models = [copy.deepcopy(stock_model) for _ in range(2)]
    source = layouts.get("input_layouts", Replicate() if style is stock.ColwiseParallel else Shard(-1))

    def body(rank: int) -> None:
        model, mesh = models[rank], build_mesh("cpu", tp=2)
        model.zero_grad()
        last = {"1": stock.ColwiseParallel(output_layouts=Replicate())}
        first = {"0": style(**layouts, use_local_output=False)}
        for part in (last, first) if in_second_dict else ({**first, **last},):
            parallelize_module(model, mesh, part)
        assert all(not isinstance(item.style, (Row, Column)) for item in resolution_of(model).plan.unlowered_styles)
        local = x / 2 if source.is_partial() else x.chunk(2, source.dim)[rank] if source.is_shard() else x
        hidden = model[0](local)
        assert isinstance(hidden, DTensor)
        out = model[1](hidden.full_tensor())
        assert (out - expected).abs().max() < 1e-12
        out.backward(grad)
        assert worst(full_gradients(model), gradients)[0] < 1e-12

    run_ranks(2, body)


def test_a_norm_under_pytorchs_function_gets_one_rank_s_values_and_stays_frozen():
    def body(rank: int) -> None:
        norm = nn.LayerNorm(4)
        nn.init.constant_(norm.weight, rank + 2.0)
        norm.bias.requires_grad_(False)
        stock.parallelize_module(norm, build_mesh("cpu", tp=2), SequenceParallel())
        assert torch.equal(norm.weight.to_local(), torch.full((4,), 2.0))
        assert norm.weight.requires_grad and not norm.bias.requires_grad

    run_ranks(2, body)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, *, scale: torch.Tensor) -> torch.Tensor:
        return x * scale if mask is None else x * scale * mask


def test_inputs_that_are_left_out_or_passed_by_keyword():
    x, mask, scale = torch.rand(4, 3), torch.rand(4, 3), torch.rand(4, 3)
    gather = stock.PrepareModuleInput(
        input_layouts=(Shard(0), Shard(0)),
        desired_input_layouts=(Replicate(), Replicate()),
        input_kwarg_layouts={"scale": Shard(0), "mask": Shard(0)},
        desired_input_kwarg_layouts={"scale": Replicate(), "mask": Replicate()},
        use_local_output=True,
    )

    def body(rank: int) -> None:
        model = parallelize_module(Masked(), build_mesh("cpu", tp=2), gather)
        shards = [tensor.chunk(2)[rank] for tensor in (x, mask, scale)]
        assert torch.equal(model(shards[0], None, scale=shards[2]), x * scale)
        assert torch.equal(model(shards[0], mask=shards[1], scale=shards[2]), x * scale * mask)
        assert torch.equal(model(*shards[:2], scale=shards[2]), x * scale * mask)

    run_ranks(2, body)


def test_a_head_that_an_evaluation_has_left_gathered_trains_on():
    """Under ZeRO 3; the hook that places its gradients is not one of the user's, which would be refused."""
    initial = tiny_model("llama", torch.float64)
    ids, targets = tiny_batch(batch=4, length=8)
    plan = {"lm_head": stock.ColwiseParallel(output_layouts=Replicate())}
    plan |= {"model.embed_tokens": Column(output_layouts=Replicate())}

    def body(rank: int) -> tuple[float, float]:
        mesh = build_mesh("cpu", dp=2, tp=2)
        parallel = parallelize_model(copy.deepcopy(initial), mesh, plan, zero=3, fuse_loss=True)
        rows = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
        call = {"input_ids": ids[rows], "targets": targets[rows]}
        return float(parallel.evaluate(**call)), float(parallel.step(**call))

    for evaluated, stepped in run_ranks(4, body):
        assert stepped == pytest.approx(evaluated, rel=1e-12)
