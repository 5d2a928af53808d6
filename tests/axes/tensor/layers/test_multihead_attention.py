"""`nn.MultiheadAttention` sharded by heads, and replicated beside sharded modules, equals the unsharded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ParallelizeError, build_mesh, full_gradients, parallelize_module
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.analysis.linting import lint
from tests.support.parity import worst
from tests.support.threads import run_ranks

WIDTH, HEADS, LENGTH = 16, 4, 6
SHARDED = "attention: multihead(heads)\n  attention.out_proj: rowwise(heads)"
REPLICATED = "attention: replicate(gradient=full)\n  attention.out_proj: replicate(gradient=full)"


class Attends(nn.Module):
    """Attention, and linears beside it that a plan shards."""

    def __init__(self, first: bool = False, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, **options)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        out, weights = self.attention(query, key, value, **options)
        return out + self.down(self.up(out).relu()), weights


def plan(attention: str, heads: int = HEADS) -> Any:
    sizes = f"sizes:\n  heads: {heads}\n" if "heads" in attention else ""
    return parse_plan(f"schema_version: 1\n{sizes}tensor_parallel:\n  {attention}\n  up: colwise\n  down: rowwise\n")


def batch(first: bool, *, cross: bool = False, single: bool = False) -> tuple[torch.Tensor, ...]:
    """(query, key, value), of which key and value have other lengths and widths where `cross`."""
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int, width: int) -> torch.Tensor:
        shape = (length, width) if single else (3, length, width) if first else (length, 3, width)
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query = drawn(LENGTH, WIDTH)
    return (query, drawn(5, 12), drawn(5, 20)) if cross else (query, query, query)


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(3, LENGTH, dtype=torch.bool).index_fill_(1, torch.tensor([LENGTH - 1]), True)
BY_HEAD = torch.randn(3 * HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
CASES: dict[str, tuple[dict, dict, dict]] = {  # (of the module, of the batch, of the call)
    "self": ({}, {}, {}),
    "without weights": ({}, {}, {"need_weights": False}),
    "batch first": ({"first": True}, {}, {"need_weights": False}),
    "single": ({}, {"single": True}, {}),
    "cross": ({"kdim": 12, "vdim": 20}, {"cross": True}, {}),
    "without bias": ({"bias": False}, {}, {"need_weights": False}),
    "causal": ({"first": True}, {}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "mask": ({}, {}, {"attn_mask": CAUSAL}),
    "mask of heads": ({}, {}, {"attn_mask": BY_HEAD, "average_attn_weights": False}),
    "padding": ({"first": True}, {}, {"key_padding_mask": PADDING, "need_weights": False}),
    "causal and padding": ({}, {}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True}),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    "more keys of two": (
        {"kdim": 12, "vdim": 20, "add_bias_kv": True},
        {"cross": True},
        {"average_attn_weights": False},
    ),
}


def step(model: nn.Module, first: bool, inputs: dict, options: dict) -> dict[str, torch.Tensor]:
    """Outputs, attention weights where they are returned, and gradients of inputs and parameters."""
    tensors = batch(first, **inputs)
    out, weights = model(*tensors, **options)
    loss = (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum()
    if weights is not None:
        loss = loss + (weights * torch.linspace(-1, 1, weights.numel(), dtype=out.dtype).view_as(weights)).sum()
    loss.backward()
    results = {"out": out.detach()} | ({} if weights is None else {"weights": weights.detach()})
    return results | {f"input {i}": x.grad for i, x in enumerate(tensors)} | full_gradients(model)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attention", [SHARDED, REPLICATED], ids=["sharded", "replicated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_unsharded(name, attention, ranks):
    options, inputs, call = CASES[name]
    initial, first = Attends(**options), options.get("first", False)
    reference = copy.deepcopy(initial)
    expected = step(reference, first, inputs, call)

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=ranks), plan(attention))
        for _ in range(2):
            model.zero_grad()
            actual = step(model, first, inputs, call)
            assert actual.keys() == expected.keys()
            assert worst(actual, expected)[0] < 1e-12, worst(actual, expected)
        owns = (
            model.attention.in_proj_weight
            if model.attention.in_proj_weight is not None
            else model.attention.q_proj_weight
        )
        assert owns.to_local().numel() == owns.numel() // (ranks if attention is SHARDED else 1)
        model.eval()
        with torch.no_grad():  # the stock forward's fused path
            out = model(*batch(first, **inputs), **call)[0]
        assert (out - expected["out"]).abs().max() < 1e-10

    run_ranks(ranks, body)


def test_a_stock_transformer_layer():
    torch.manual_seed(0)
    initial = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).double()
    rules = (
        "layers.*.self_attn: multihead(heads)\n  layers.*.self_attn.out_proj: rowwise(heads)\n"
        "  layers.*.linear1: colwise\n  layers.*.linear2: rowwise\n  layers.*.norm{1,2}: sequence"
    )
    layers = parse_plan(f"schema_version: 1\nsizes:\n  heads: {HEADS}\ntensor_parallel:\n  {rules}\n")
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(initial)
    expected = reference(x)
    expected.square().sum().backward()

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=2), layers)
        out = model(x)
        out.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert (out - expected).abs().max() < 1e-12 and worst(full_gradients(model), gradients)[0] < 1e-12
        model.eval()
        with torch.no_grad():
            assert (model(x) - expected).abs().max() < 1e-12

    run_ranks(2, body)


class Layer(nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=first)
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) if self.first else self.norm(x).transpose(0, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return x + (h if self.first else h.transpose(0, 1))


class Layers(nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers, self.norm = nn.ModuleList(Layer(first) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("first", [False, True], ids=["length first", "batch first"])
@pytest.mark.parametrize("length", [6, 7])
def test_inside_the_sequence_parallel_region(first, length):
    rules = (
        "embed: embedding\n  layers.*.attention: multihead(heads)\n  layers.*.attention.out_proj: rowwise(heads)\n"
        "  layers.*.norm: sequence\n  norm: sequence\n  head: colwise(output=full)"
    )
    region = "sequence_parallel:\n  layers: layers\n  leave: norm\n"
    text = f"schema_version: 1\nsizes:\n  heads: {HEADS}\n{region}tensor_parallel:\n  {rules}\n"
    initial, ids = Layers(first), torch.arange(2 * length).view(2, length) % 11
    reference = copy.deepcopy(initial)
    expected = reference(ids)
    expected.square().sum().backward()

    def body(rank: int) -> None:
        model = copy.deepcopy(initial)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(text), sequence_parallel=True)
        out = model(ids)
        out.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert (out - expected).abs().max() < 1e-12 and worst(full_gradients(model), gradients)[0] < 1e-12

    run_ranks(2, body)


REFUSED = {
    "in_proj alone": (
        "attention: multihead(heads)\n  attention.out_proj: replicate(gradient=full)",
        HEADS,
        "reads-child-parameters",
    ),
    "out_proj alone": (
        "attention: replicate(gradient=full)\n  attention.out_proj: rowwise(heads)",
        HEADS,
        "reads-child-parameters",
    ),
    "no number of heads": ("attention: multihead\n  attention.out_proj: rowwise(heads)", HEADS, "missing-unit"),
    "another number of heads": (SHARDED, 8, "uneven-heads"),
    "another module": (
        "attention: replicate(gradient=full)\n  attention.out_proj: multihead(heads)",
        HEADS,
        "wrong-module-for-style",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rules_that_do_not_fit_are_refused(name):
    attention, heads, slug = REFUSED[name]

    def body(rank: int) -> None:
        with pytest.raises(ParallelizeError) as error:
            parallelize_module(Attends(), build_mesh("cpu", tp=2), plan(attention, heads))
        assert slug in error.value.slugs

    run_ranks(2, body)


def test_a_causal_call_needs_its_mask():
    """As the stock module, which raises a RuntimeError."""

    def body(rank: int) -> None:
        model = parallelize_module(Attends(), build_mesh("cpu", tp=2), plan(SHARDED))
        with pytest.raises(ParallelizeError, match="no-mask"):
            model(*batch(False), is_causal=True)

    run_ranks(2, body)


def test_attention_dropout_is_refused_in_training():
    """There is no mask that the unsharded module would draw too."""

    def body(rank: int) -> None:
        model = parallelize_module(Attends(dropout=0.1), build_mesh("cpu", tp=2), plan(SHARDED))
        with pytest.raises(ParallelizeError, match="dropout-not-installed"):
            model(*batch(False))
        assert model.eval()(*batch(False))[0].isfinite().all()

    run_ranks(2, body)


def test_lint_runs_it():
    """The planned forward on tensors without values, and the error of a rule that is missing."""

    def source() -> dict[str, Any]:
        return {"model": Attends(first=True).float(), "inputs": inputs}

    def inputs(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("query", "key", "value"), torch.zeros(batch, sequence, WIDTH))

    assert lint(source, plan(SHARDED), "tp=2") == []
    slugs = [item.problem.slug for item in lint(source, plan(REFUSED["in_proj alone"][0]), "tp=2")]
    assert slugs == ["reads-child-parameters"]
