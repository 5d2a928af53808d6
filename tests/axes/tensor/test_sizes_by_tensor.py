"""A forward that reads the width of its input, and means that of this rank's heads in views of shards and the full one
elsewhere, computes what the unsharded one does."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from parallelize import ShapeError, build_mesh, full_gradients, parallelize_module, verify
from parallelize.axes.tensor.sizes_by_tensor import FullAndLocal, sized
from parallelize.plan.plan_file import parse_plan
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

HEADS, SIZE = 12, 5
WIDTH, VOCABULARY = HEADS * SIZE, 38
T = torch.Tensor
TEXT = """
schema_version: 1
sizes: {heads: 12}
sequence_parallel: {layers: blocks, leave: norm}
tensor_parallel:
  table: embedding
  blocks.*:
    norm: sequence
    attention: gather
    attention.c_attn: colwise(heads + heads + heads)
    attention.c_proj: rowwise(heads)
    attention.inner: replicate(gradient=partial)
  norm: sequence
  head: colwise(output=vocabulary)
local: {blocks.*.attention: {n_head: heads, n_embd: heads}}
local_inputs: {blocks.*.attention: {x: "width(heads, elsewhere=full)"}}
pipeline: {layers: blocks}
"""


class Attention(nn.Module):
    """C is the width of a view of its input, of the scale, of a range of a table, and of views of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.LayerNorm(WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("table", torch.linspace(0.5, 1.5, 2 * WIDTH))

    def forward(self, x: T) -> T:
        B, length, C = x.shape
        assert C == x.size(-1) == x.size()[2] == WIDTH and math.log2(C) == math.log2(WIDTH)
        tokens = (self.inner(x.view(-1, C)) * self.table[:C] * (1 - 1 / C)).view(B, length, C)
        q, k, v = (
            y.view(-1, length, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.c_attn(tokens).split(self.n_embd, dim=2)
        )
        weights = (q @ k.transpose(-2, -1) * C**0.5 / C * math.sqrt(self.n_head)).softmax(-1)
        y = self.c_proj(self.merged(weights @ v, B, length, C))
        return y.view(*y.shape[:2], C)  # of full features, and of this rank's tokens under sequence parallelism

    def merged(self, y: T, *shape: int) -> T:
        return y.transpose(1, 2).contiguous().view(*shape)


class Merging(Attention):
    """Merges by a number that only the length tells from the batch."""

    def merged(self, y: T, *shape: int) -> T:
        return y.transpose(1, 2).reshape(-1, shape[-1]).unflatten(0, shape[:2])


class Unknown(Attention):
    def merged(self, y: T, *shape: int) -> T:
        return torch.nn.functional.pad(super().merged(y, *shape), (0, shape[-1]))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: T) -> T:
        return x + self.attention(self.norm(x))


class Net(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(attention) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: T) -> T:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# as many rows as heads, and as many tokens as heads on a rank
IDS = torch.randint(0, VOCABULARY, (HEADS, HEADS // 2), generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, tp: int) -> nn.Module:
    return parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=tp), parse_plan(TEXT), loss_parallel=False)


@pytest.mark.parametrize("attention", [Attention, Merging])
@pytest.mark.parametrize("tp", [2, 4])
def test_outputs_and_gradients_are_those_of_the_unsharded_model(tp, attention):
    torch.manual_seed(0)
    initial = Net(attention).double()
    expected = initial(IDS)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in initial.named_parameters()}

    def body(rank: int) -> None:
        model = planned(initial, tp)
        assert model.blocks[0].attention.n_head == HEADS and model.blocks[0].attention.n_head.local == HEADS // tp
        for again in (model, copy.deepcopy(model)):
            again.zero_grad()
            for _ in range(2):  # the first is watched
                out = again(IDS)
                assert (out - expected).abs().max() < 1e-11
            with torch.no_grad():
                assert (again(IDS) - expected).abs().max() < 1e-11
            out.square().sum().backward()
            assert worst(full_gradients(again), gradients)[0] < 1e-12

    run_ranks(tp, body)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp=2", {"recompute": "full"}),
        pytest.param("dp=2,tp=2", {"zero": 3}, marks=pytest.mark.sweep),
        pytest.param("dp=2,tp=2", {"zero": 3, "recompute": "full"}, marks=pytest.mark.sweep),
        pytest.param("pp=2,tp=2", {}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_on_a_whole_mesh(mesh, options):
    """With and without sequence parallelism, in a step of `parallelize verify`."""
    result = verify(Net, parse_plan(TEXT), mesh, **options)
    assert result.ok, str(result)
    assert {"plain", "sequence parallel"} <= {row.mode for row in result.rows} or "pp" in mesh


def test_integers_know_both_numbers():
    width, heads = FullAndLocal(60, 30), FullAndLocal(12, 6)
    assert (width, width // heads, type(width // heads)) == (60, 5, int)
    for result, full, local in [
        (width * 2, 120, 60), (2 * width, 120, 60), (width + heads, 72, 36), (width - 2, 58, 28), (70 - width, 10, 40),
        (width // 2, 30, 15), (120 // width, 2, 4), (heads**2, 144, 36), (width % 7, 4, 2), (70 % width, 10, 10),
    ]:  # fmt: skip
        assert (result, getattr(result, "local", result)) == (full, local)
    assert width**-0.5 == 60**-0.5 and width / 2 == 30.0 and 1 / width == 1 / 60 and math.sqrt(width) == 60**0.5
    again = copy.deepcopy(width)
    assert (again, again.local, sized(5, 5)) == (60, 30, 5) and not isinstance(sized(5, 5), FullAndLocal)


def test_a_function_of_a_shard_that_may_mean_either_is_refused():
    model = Net(Unknown)

    def body(rank: int) -> None:
        with refused(ShapeError, "size-or-number", "`pad` of a shard"):
            planned(model, 2)(IDS)

    run_ranks(2, body)


def test_a_width_that_heads_do_not_divide_is_refused():
    def body(rank: int) -> None:
        attention = planned(Net(), 4).blocks[0].attention
        with refused(ShapeError, "uneven-input", "58 features"):
            attention(torch.ones(2, 3, 58))

    run_ranks(4, body)


def test_a_compiled_model_leaves_such_a_forward_to_eager_mode():
    torch.manual_seed(0)
    initial = Net().double()
    expected = initial(IDS)

    def body(rank: int) -> None:
        model = planned(initial, 2)
        model(IDS)
        compiled = torch.compile(model, backend="eager")
        assert (compiled(IDS) - expected).abs().max() < 1e-11

    run_ranks(2, body)
