"""`output_hidden_states` in a sequence-parallel region: all tokens, with the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ParallelizeError, build_mesh, full_gradients, next_tokens, parallelize_model
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [6, 7, 8, 9, 10, 11, 12]])


NAMES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def loss_of(output):
    """Each hidden state with a weight of its own."""
    states = [state for name in NAMES for state in getattr(output, name, None) or ()]
    return output.logits.square().mean() + sum(n * state.sin().mean() for n, state in enumerate(states, 1)), states


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", {"tp": 2}),
        ("llama", {"tp": 4}),  # one of the ranks has padding alone
        ("llama", {"dp": 2, "tp": 2}),
        ("bert", {"tp": 2}),
        ("gpt_oss", {"tp": 2}),
    ],
    ids=str,
)
def test_hidden_states_and_gradients(family, axes):
    reference = tiny_model(family, torch.float64)
    ranks = 2 * axes.get("dp", 1) if axes["tp"] == 2 else 4
    models = [copy.deepcopy(reference) for _ in range(ranks)]
    loss, states = loss_of(reference(input_ids=IDS, output_hidden_states=True))
    (axes.get("dp", 1) * loss).backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(g.abs().max() for g in gradients.values())

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), sequence_parallel=True)
        loss, states = loss_of(parallel.module(input_ids=IDS, output_hidden_states=True))
        loss.backward()
        return [state.detach() for state in states], full_gradients(parallel.module)

    for own_states, own in run_ranks(ranks, body):
        assert len(own_states) == len(states)
        for state, expected in zip(own_states, states, strict=True):
            assert state.shape == expected.shape and (state - expected).abs().max() < 1e-12 * expected.abs().max()
        for name, gradient in gradients.items():
            floor = torch.maximum(gradient.abs().max(), 1e-3 * largest)
            assert (own[name] - gradient).abs().max() <= 1e-12 * floor, name


def test_a_stage_refuses_them():
    models, rows = [tiny_model("llama", torch.float64) for _ in range(4)], IDS.repeat(4, 1)

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", pp=2, tp=2), sequence_parallel=True)
        with pytest.raises(ParallelizeError) as error:
            parallel.step(input_ids=rows, targets=next_tokens(rows), output_hidden_states=True)
        return str(error.value)

    assert all("hidden-states-are-shards" in text for text in run_ranks(4, body))


def test_an_encoder_and_its_decoder():
    """Two regions, whose hidden states the model returns under names of their own."""
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDE.items()}
    config = BartConfig(vocab_size=67, d_model=48, dropout=0.0, max_position_embeddings=64, **sides)
    torch.manual_seed(0)
    reference = BartForConditionalGeneration(config).double().train()
    models = [copy.deepcopy(reference) for _ in range(2)]
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5], "output_hidden_states": True, "use_cache": False}
    loss, states = loss_of(reference(**inputs))
    loss.backward()
    assert len(states) == 6
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(g.abs().max() for g in gradients.values())

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        loss_of(parallel.module(**inputs))[0].backward()
        return full_gradients(parallel.module)

    for own in run_ranks(2, body):
        for name, gradient in gradients.items():
            floor = torch.maximum(gradient.abs().max(), 1e-3 * largest)
            assert (own[name] - gradient).abs().max() <= 1e-12 * floor, name


SIDE = {"layers": 2, "attention_heads": 6, "ffn_dim": 72}
