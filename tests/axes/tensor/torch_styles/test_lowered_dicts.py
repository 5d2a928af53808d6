"""Dicts of style objects become plans: with overlap, fused loss, explain, verify, checkpoints, pipeline and ZeRO."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as stock

import parallelize
from parallelize import (
    Checkpointer,
    PlanError,
    build_mesh,
    cross_entropy,
    describe_plan,
    explain,
    full_parameter,
    load_checkpoint,
    overlap_counts,
    parallelize_model,
    parallelize_module,
    verify,
)
from parallelize.axes.tensor.torch_styles.lowering import readers_of_input, readers_of_output
from parallelize.state.records import record_of, resolution_of
from tests.support.parity import worst
from tests.support.threads import run_ranks
from tests.support.tutorial import sequence_parallel, tensor_parallel

VOCAB, DIM, HEADS, INNER = 30, 24, 4, 40


class Attention(nn.Module):
    """Its views follow the local width, as PyTorch's tutorials do with DTensors."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x, freqs):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q * freqs, k * freqs, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(DIM, INNER), nn.Linear(INNER, DIM), nn.Linear(DIM, INNER)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x, freqs):
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 1.5), requires_grad=False)  # no style names it

    def forward(self, ids):
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, self.scale)
        return self.output(self.norm(h))


class ReadingAttention(Attention):
    """Computes with the input itself, so that it must be the DTensor that the style makes."""

    def forward(self, x, freqs):
        self.seen = x
        return super().forward(x * 1.0, freqs)


torch.manual_seed(0)
INITIAL = Transformer()


def build() -> Transformer:
    """Ranks are threads with one generator, so that each copies the model."""
    return copy.deepcopy(INITIAL)


def with_inputs() -> dict[str, Any]:
    return {"model": Transformer(), "inputs": lambda rows, length: batch(rows, length)}


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % VOCAB
    return {"ids": ids, "targets": ids.roll(1, 1)}


DICTS = {
    "tensor": lambda: tensor_parallel(stock),
    "sequence": lambda: sequence_parallel(stock, False),
    "our styles": lambda: sequence_parallel(parallelize, False),
}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def reference(dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, torch.Tensor]]:
    model, inputs = build().to(dtype), batch(2, 8)
    loss = cross_entropy(model(inputs["ids"]), inputs["targets"])
    loss.backward()
    return float(loss), gradients(model)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize("options", [{}, {"overlap": "chunked"}, {"fuse_loss": True}, {"loss_parallel": True}], ids=str)
def test_a_lowered_dict_is_exact(kind, options):
    expected_loss, expected = reference()

    def body(rank: int) -> None:
        model, inputs = build().double(), batch(2, 8)
        parallelize_module(model, build_mesh("cpu", tp=2), DICTS[kind](), **options)
        assert record_of(model).resolved.plan.unlowered_styles == ()
        loss = cross_entropy(model(inputs["ids"]), inputs["targets"])
        loss.backward()
        assert abs(float(loss) - expected_loss) < 1e-12
        assert worst(gradients(model), expected)[0] < 1e-12
        if "overlap" in options:
            overlapped = overlap_counts(model)
            assert len(overlapped) >= 9 and all(count == calls == 1 for calls, count in overlapped.values()), overlapped

    run_ranks(2, body)


def test_what_no_style_names_stays_plain():
    def body(rank: int) -> str:
        model = parallelize_module(build(), build_mesh("cpu", tp=2), tensor_parallel(stock))
        assert not isinstance(model.scale, DTensor) and not isinstance(model.norm.weight, DTensor)
        assert isinstance(model.output.weight, DTensor)
        return describe_plan(model)

    text = run_ranks(2, body)[0]
    assert "plan styles: tp=2" in text and "layers.*.attention_norm.weight (x2)" in text
    assert "scale " in text and "  plain" in text


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_dicts_are_verified(kind):
    report = verify(with_inputs, DICTS[kind](), "tp=2")
    assert report.ok, report
    wrong = DICTS[kind]()
    del wrong["layers.*.feed_forward.w3"]
    assert not verify(with_inputs, wrong, "tp=2").ok


def test_dicts_are_explained():
    by_dict = explain(with_inputs, sequence_parallel(stock, False), "dp=2,tp=2", sequence=16, zero=1)
    ops = {message.op for message in by_dict.ranks[0].messages if message.axis == "tp"}
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= ops
    names = {line.name: line for line in by_dict.parameters}
    assert names["layers.*.attention.wo.weight"].local == (DIM, DIM // 2)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_dicts_on_more_axes(kind, axes):
    expected_loss, expected = reference()

    def body(rank: int) -> None:
        mesh, model, inputs = build_mesh("cpu", **axes), build().double(), batch(2, 8)
        value = model._parameters.pop("scale")
        model.register_buffer("scale", value.detach())  # a parameter of the root has no pipeline stage
        parallel = parallelize_model(
            model, mesh, DICTS[kind](), zero=2 if "dp" in axes else 0, num_microbatches=axes.get("pp", 1)
        )
        part, parts = (mesh.get_local_rank("dp"), 2) if "dp" in axes else (0, 1)
        local = {name: value.chunk(parts)[part] for name, value in inputs.items()}
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1.0)
        before = {name: full_parameter(model, name, p).clone() for name, p in model.named_parameters()}
        loss = parallel.step(local["ids"], targets=local["targets"])
        optimizer.step()
        assert abs(float(loss) - expected_loss) < 1e-12
        stepped = {name: before[name] - full_parameter(model, name, p) for name, p in model.named_parameters()}
        assert worst(*({n: x[n] for n in before if n in expected} for x in (stepped, expected)))[0] < 1e-12

    run_ranks(4, body)


def test_a_checkpoint_of_a_dict_is_read_on_another_mesh(tmp_path):
    def write(rank: int) -> None:
        model = parallelize_module(build(), build_mesh("cpu", tp=2), sequence_parallel(stock, False))
        with Checkpointer(tmp_path / "saved", model) as checkpoints:
            checkpoints.save(1)

    def read(rank: int) -> None:
        model = parallelize_module(Transformer(), build_mesh("cpu", tp=4), tensor_parallel(stock))
        load_checkpoint(tmp_path / "saved", model)
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        assert all(torch.equal(full[name], value) for name, value in build().named_parameters())

    run_ranks(2, write)
    run_ranks(4, read)


def test_code_that_computes_with_a_gathered_input_gets_a_dtensor():
    expected_loss, expected = reference()

    def body(rank: int) -> None:
        model, inputs = build().double(), batch(2, 8)
        for layer in model.layers:
            layer.attention.__class__ = ReadingAttention
        mesh = build_mesh("cpu", tp=2)
        with pytest.raises(PlanError, match=r"no-overlap: .*layers\.0\.attention: code may read"):
            parallelize_module(copy.deepcopy(model), mesh, sequence_parallel(stock, False), overlap="chunked")
        parallelize_module(model, mesh, sequence_parallel(stock, False))
        assert not resolution_of(model).plan.unlowered_styles
        for _ in range(3):
            model.zero_grad()
            loss = cross_entropy(model(inputs["ids"]), inputs["targets"])
            loss.backward()
            assert abs(float(loss) - expected_loss) < 1e-12 and worst(gradients(model), expected)[0] < 1e-12
        assert isinstance(model.layers[0].attention.seen, DTensor)

    run_ranks(2, body)


class Own(stock.ColwiseParallel):
    """A third party's style."""


def test_a_style_of_a_third_party_is_applied_as_it_is():
    def body(rank: int) -> None:
        model = build()
        styles = tensor_parallel(stock) | {"layers.*.feed_forward.w1": Own(), "layers.*.feed_forward.w3": Own()}
        parallelize_module(model, build_mesh("cpu", tp=2), styles)
        kept = resolution_of(model).plan.unlowered_styles
        assert {item.reason for item in kept} == {"a Own has no equivalent"} and len(kept) == 4
        inputs = batch(2, 8)
        loss = cross_entropy(model(inputs["ids"]), inputs["targets"])
        assert abs(float(loss) - reference(torch.float32)[0]) < 1e-5

    run_ranks(2, body)


class Forwards(nn.Module):
    """Forwards whose reads are known, or are not."""

    def forward(self, x, y):
        if x.shape[0] > 1:
            return self.a(self.norm(x)) + self.b(x)
        return self.c(x, y)


class Unknown(nn.Module):
    def forward(self, x):
        x = x + 1
        return self.a(x)


class Kept(nn.Module):
    def forward(self, x):
        h = self.norm(x)
        return self.a(h) + h


class Variables(nn.Module):
    """Outputs of norms by a variable: read by children alone, or also otherwise."""

    def forward(self, x):
        h = self.first(x)
        q, k = self.wq(h), self.wk(h)
        h = self.second(q + k)
        y = self.up(h) * h.shape[1]
        h = self.third(y)
        for _ in range(2):
            h = self.wo(h)
        return h


def test_the_reads_of_a_forward():
    assert readers_of_output(Variables, "first") == {"wq", "wk"}
    assert readers_of_output(Variables, "second") is None and readers_of_output(Variables, "third") is None
    assert readers_of_input(Forwards) == {"norm", "b", "c"} and readers_of_output(Forwards, "norm") == {"a"}
    assert readers_of_input(Unknown) is None
    assert readers_of_output(Kept, "norm") is None and readers_of_output(Kept, "absent") is None
    assert readers_of_input(Attention) == {"wq", "wk", "wv"} and readers_of_input(FeedForward) == {"w1", "w3"}
    assert readers_of_input(nn.Identity) is None


@pytest.mark.parametrize(
    "style",
    [
        stock.ColwiseParallel(output_layouts=Shard(1)),
        stock.ColwiseParallel(input_layouts=Shard(-1)),
        stock.RowwiseParallel(input_layouts=Shard(1)),
        stock.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    ],
    ids=["column output", "column input", "row input", "no gather"],
)
def test_layouts_without_a_contract_are_applied_as_they_are(style):
    def body(rank: int) -> None:
        model = parallelize_module(build(), build_mesh("cpu", tp=2), {"layers.0.feed_forward.w1": style})
        assert [item.fqn for item in resolution_of(model).plan.unlowered_styles] == ["layers.0.feed_forward.w1"]

    run_ranks(2, body)
