"""Dropout over `cp` drops what one process drops: attention weights, activations, in every split of tokens and
heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import (
    ModelError,
    build_mesh,
    context_parallel,
    full_gradients,
    gather_sequence,
    install_dropout,
    parallelize_model,
    parallelize_module,
    split_sequence,
)
from parallelize.ops.attention import score_blocks, weight_dropout
from parallelize.state.randomness.dropout.position import Position
from tests.axes.context.test_context import Block, Own, own_plan, packed_positions
from tests.axes.vocabulary.small_head import slug_of
from tests.support.context import batch_of, error_of, family, softmax_in_float64
from tests.support.parity import worst
from tests.support.threads import run_ranks

LENGTH = 13
RATES: dict[str, dict[str, float]] = {
    "gpt2": dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3),
    "bert": dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3),
    "llama": dict(attention_dropout=0.3),
    "mistral": dict(attention_dropout=0.3),
    "gemma2": dict(attention_dropout=0.3),
    "opt": dict(dropout=0.2, attention_dropout=0.3),
    "phi3": dict(resid_pdrop=0.2, embd_pdrop=0.1, attention_dropout=0.3),
    "deepseek_v3": dict(attention_dropout=0.3),
}


def model_of(name: str, dtype: torch.dtype = torch.float64, kind: str = "sdpa", **overrides: Any) -> Any:
    return family(name, dtype, attn_implementation=kind, **{**RATES[name], **overrides}).train()


def two_steps_alone(model: Any, ids: Any, targets: Any, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Loss and gradients of two steps of one process, which draw different masks."""
    alone, results = copy.deepcopy(model), []
    install_dropout(alone)
    if "bert" not in type(model).__name__.lower():
        inputs = {**inputs, "use_cache": False}
    for _ in range(2):
        alone.zero_grad()
        with softmax_in_float64():
            logits = alone(input_ids=ids, **inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        grads = {f"grad {name}": p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | grads)
    assert float((results[0]["loss"] - results[1]["loss"]).abs()) > 1e-5  # each step drops others
    return results


def two_steps(model: Any, sizes: dict[str, int], ids: Any, targets: Any, inputs: dict[str, Any], **options: Any) -> Any:
    model, mesh = copy.deepcopy(model), build_mesh("cpu", **sizes)
    if sizes.get("dp", 1) > 1:
        index, size = mesh.get_local_rank("dp"), sizes["dp"]
        ids, targets = ids.chunk(size)[index], targets.chunk(size)[index]
        inputs = {key: value.chunk(size)[index] for key, value in inputs.items()}
    tied = model.config.tie_word_embeddings
    parallel, results = parallelize_model(model, mesh, **options), []
    for _ in range(2):
        loss = parallel.step(input_ids=ids, targets=targets, **inputs)
        grads = full_gradients(parallel.module)
        grads = {
            f"grad {name}": grad.clone() for name, grad in grads.items() if not (tied and name == "lm_head.weight")
        }
        results.append({"loss": loss.detach()} | grads)
        for parameter in parallel.module.parameters():
            parameter.grad = None
    return results


def check(
    model: Any, sizes: dict[str, int], inputs: Any = None, batch: int = 2, limit: float = 1e-12, **options: Any
) -> None:
    inputs, (ids, targets) = inputs or {}, batch_of(LENGTH, batch)
    if "attention_mask" in inputs:
        targets[inputs["attention_mask"] == 0] = -100
    expected = two_steps_alone(model, ids, targets, inputs)
    world = int(torch.tensor(list(sizes.values())).prod())
    for results in run_ranks(world, lambda rank: two_steps(model, sizes, ids, targets, inputs, **options)):
        for result, reference in zip(results, expected, strict=True):
            error, name = error_of(result, reference)
            assert error <= limit, f"{name} differs by {error:.1e}"


@pytest.mark.variants(every=8)
@pytest.mark.parametrize(("cp", "ulysses"), [(2, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", RATES)
def test_equals_one_process(name, cp, ulysses):
    kind = "eager" if name == "gemma2" else "sdpa"  # PyTorch's own attention would leave out its soft cap
    check(model_of(name, kind=kind), {"cp": cp}, ulysses=ulysses)


def padded() -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, -4:] = 0
    return mask


COMPOSED: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"cp": 2, "tp": 2}, {"sequence_parallel": True, "ulysses": 2}),
    ("llama", {"dp": 2, "cp": 2}, {"packed": True, "recompute": "full"}),
    ("phi3", {"cp": 2, "tp": 2}, {}),
    ("gpt2", {"cp": 4, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True, "recompute": "full"}),
    ("opt", {"dp": 2, "cp": 2}, {"padded": True, "zero": 1}),
    ("gpt2", {"cp": 2}, {"recompute": "selective"}),
    ("gpt2", {"cp": 2}, {"recompute": "selective", "recompute_save": ("ring_attention",)}),
    ("gpt2", {"cp": 2}, {"recompute": "full", "ulysses": 2}),
    ("bert", {"cp": 2}, {"padded": True}),
    ("mistral", {"cp": 4}, {"packed": True, "ulysses": 2}),
    ("gpt2", {"pp": 2, "cp": 2}, {"num_microbatches": 2}),
    ("opt", {"pp": 2, "dp": 2, "cp": 2}, {"num_microbatches": 2}),
    ("gpt2", {"dp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True}),
]


@pytest.mark.variants(every=13)
@pytest.mark.parametrize(("name", "sizes", "options"), COMPOSED, ids=str)
def test_with_other_axes(name, sizes, options):
    options, inputs = dict(options), {}
    if options.pop("packed", False):
        inputs["position_ids"] = packed_positions(LENGTH)
    if options.pop("padded", False):
        inputs["attention_mask"] = padded()
    batch = 4 if "pp" in sizes and "dp" in sizes else 2
    check(model_of(name), sizes, inputs, batch, **options)


@pytest.mark.sweep
def test_the_masks_of_eager_attention_and_single_precision():
    ids, targets = batch_of(LENGTH)
    stock = two_steps_alone(model_of("gpt2", kind="eager"), ids, targets, {})
    model = model_of("gpt2")
    for results in run_ranks(2, lambda rank: two_steps(model, {"cp": 2}, ids, targets, {})):
        assert max(error_of(*pair)[0] for pair in zip(results, stock, strict=True)) <= 1e-12
    check(model_of("llama", torch.float32), {"cp": 2}, limit=5e-6)


@pytest.mark.sweep
def test_checkpointing_of_transformers():
    model = model_of("gpt2")
    model.gradient_checkpointing_enable()
    check(model, {"cp": 2}, ulysses=2)


@pytest.mark.sweep
def test_blocks_of_any_size_drop_the_same(monkeypatch):
    monkeypatch.setattr(score_blocks, "_BLOCK_ROWS", 6)
    monkeypatch.setattr(score_blocks, "_BLOCK_KEYS", 4)
    monkeypatch.setattr(weight_dropout, "block_size", lambda device: 8)
    check(model_of("llama"), {"cp": 2})


class DroppedBlock(Block):
    """Drops the weights of PyTorch's own attention."""

    rate = 0.3

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 6).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Dropped(Own):
    """Dropout of attention weights, and between attention and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.blocks = nn.Dropout(0.2), nn.ModuleList(DroppedBlock() for _ in range(2))

    def forward(self, ids, indices):
        x = self.embed(ids) + self.at(indices)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_model_of_ones_own_by_context_parallel_alone(ulysses):
    torch.manual_seed(0)
    model, (ids, _) = Dropped().double(), batch_of(LENGTH)
    indices, weight = torch.arange(LENGTH).unsqueeze(0), torch.randn(2, LENGTH, 67, dtype=torch.float64)
    reference = copy.deepcopy(model)
    install_dropout(reference, 5)
    (reference(ids, indices) * weight).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank):
        mesh = build_mesh("cpu", cp=2)
        net = context_parallel(copy.deepcopy(model), mesh, own_plan(), ulysses=ulysses, own_reduction=True)
        assert slug_of(ModelError, lambda: net(ids, indices)) == "dropout-not-installed"
        install_dropout(net, 5)
        (net(ids, indices) * split_sequence(net, weight)).sum().backward()
        return {name: p.grad for name, p in net.named_parameters()}

    parts = run_ranks(2, body)
    assert worst({name: parts[0][name] + parts[1][name] for name in expected}, expected)[0] <= 1e-12


def test_rows_of_the_global_batch_draw_their_part_of_the_masks():
    """A microbatch at its position, over cp, gives the rows of the full batch."""
    model, (ids, _) = model_of("gpt2"), batch_of(LENGTH, 4)
    reference = copy.deepcopy(model)
    with install_dropout(reference, 7).at(Position(step=3)):
        expected = reference(input_ids=ids, use_cache=False).logits[1:3].detach()

    def body(rank):
        net = context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2))
        with install_dropout(net, 7).at(Position(step=3, batch_offset=1, batch_size=2)):
            return gather_sequence(net, net(input_ids=ids[1:3]).logits).detach()

    for actual in run_ranks(2, body):
        assert worst({"": actual}, {"": expected})[0] <= 1e-12


def test_dropout_that_is_installed_too_early_or_around_the_model_is_refused():
    def body(rank):
        mesh, model = build_mesh("cpu", cp=2), model_of("gpt2")
        install_dropout(model)
        assert slug_of(ModelError, lambda: context_parallel(model, mesh)) == "early-dropout"
        assert slug_of(ModelError, lambda: parallelize_module(model, build_mesh("cpu", tp=2))) == "early-dropout"
        inside = nn.Sequential(context_parallel(model_of("gpt2"), mesh))
        assert slug_of(ModelError, lambda: install_dropout(inside)) == "unplaceable-dropout"

    run_ranks(2, body)


class Spread(Own):
    """Dropout of an activation in which heads stand before tokens."""

    def forward(self, ids, indices):
        x = (self.embed(ids) + self.at(indices)).unflatten(-1, (6, 4)).transpose(1, 2)
        return super().forward(ids, indices) + nn.functional.dropout(x, 0.5, self.training).sum()


def test_activations_whose_tokens_cannot_be_told_are_refused():
    def body(rank):
        net = context_parallel(Spread(), build_mesh("cpu", cp=2), own_plan())
        install_dropout(net)
        ids, indices = batch_of(12)[0], torch.arange(12).unsqueeze(0)  # six tokens a rank, six heads
        assert slug_of(ModelError, lambda: net(ids, indices)) == "unplaceable-dropout"

    run_ranks(2, body)
