"""The log-probabilities that `generate` returns, and those of the forwards that train on its tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, generate, next_tokens, parallelize_model, parallelize_module, token_log_probs
from tests.axes.vocabulary.generation.generation_jobs import lively_model, prompts
from tests.support.threads import run_ranks

T = torch.Tensor
NEW = 6
MODES = {
    "whole": {},
    "sharded": {"sequence_parallel": True, "loss_parallel": True},
    "fused": {"loss_parallel": True, "fuse_loss": True},
}
DRAWS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "filtered": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
    "one for each row": {"temperature": torch.tensor([0.0, 0.6, 1.7])},
}


def generated(model: nn.Module, **how) -> tuple[T, T]:
    ids, mask = prompts()
    options = {"max_new_tokens": NEW, "eos_token_id": [], "output_log_probs": True, "seed": 3} | how
    return generate(model, ids, attention_mask=mask, **options)


def expected_log_probs(model: nn.Module, sequences: T, temperature: float | T) -> T:
    """By PyTorch, of one forward over prompts and answers without a cache."""
    mask = torch.cat([prompts()[1], torch.ones(len(sequences), NEW, dtype=torch.long)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    divisor = torch.as_tensor(temperature, dtype=torch.float64).expand(len(sequences)).view(-1, 1, 1)
    scaled = logits[:, -NEW - 1 : -1] / torch.where(divisor == 0, 1.0, divisor)
    return scaled.log_softmax(-1).gather(-1, sequences[:, -NEW:, None]).squeeze(-1)


@pytest.mark.parametrize("draws", DRAWS)
def test_they_are_those_of_a_forward_without_a_cache(draws):
    """Of the unfiltered distribution, divided by the temperature, on any mesh."""
    model, how = lively_model("llama"), DRAWS[draws]
    sequences, log_probs = generated(model, **how)
    wanted = expected_log_probs(model, sequences, how.get("temperature", 1.0))
    torch.testing.assert_close(log_probs, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(sequences, generated(model, **how, output_log_probs=False))
    for tp, mode in ((2, "whole"), (2, "sharded"), (2, "fused"), (4, "sharded")):
        models = [copy.deepcopy(model) for _ in range(tp)]

        def body(rank, models=models, tp=tp, mode=mode):
            return generated(parallelize_module(models[rank], build_mesh("cpu", tp=tp), **MODES[mode]), **how)

        for tokens, actual in run_ranks(tp, body):
            assert torch.equal(tokens, sequences)
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_a_row_has_none_after_its_end():
    model = lively_model("llama")
    free, whole = generated(model)
    stop = [int(free[0, -NEW + 1])]
    sequences, log_probs = generated(model, eos_token_id=stop, pad_token_id=0)
    count = log_probs.shape[1]
    assert sequences.shape[1] == prompts()[0].shape[1] + count
    assert torch.equal(log_probs[0, :2], whole[0, :2]) and not log_probs[0, 2:].any()
    assert torch.equal(log_probs[1], whole[1, :count])  # its end is another, or none


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_prompt_s_own_forward_has_their_bits(dtype, temperature):
    """The first new token is drawn from the logits of the prompt, as training computes them too."""
    model = lively_model("llama", dtype)
    sequences, log_probs = generated(model, temperature=temperature, max_new_tokens=1)
    ids, mask = prompts()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=True)
    wanted = token_log_probs(out.logits[:, -1], sequences[:, -1], temperature=temperature)
    assert log_probs.dtype == torch.float32 and torch.equal(log_probs[:, 0], wanted)


BY_STEP = {
    "tp": ({"tp": 2}, {"loss_parallel": True}),
    "tp, sequence parallel": ({"tp": 2}, MODES["sharded"]),
    "tp, fused": ({"tp": 2}, MODES["fused"]),
    "tp, recomputed": ({"tp": 2}, {"loss_parallel": True, "recompute": "full"}),
    "dp, ZeRO 0": ({"dp": 2}, {"zero": 0}),
    "dp, ZeRO 1": ({"dp": 2}, {"zero": 1}),
    "dp, ZeRO 2": ({"dp": 2, "tp": 2}, {"zero": 2, "loss_parallel": True}),
    "dp, ZeRO 3": ({"dp": 2}, {"zero": 3}),
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("where", BY_STEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_log_probs_of_a_forward_have_the_bits_of_the_step(where, dtype, padded):
    """`forward` of a planned model that has generated, and the forward of `step`: the first ratio is exactly 1."""
    sizes, options = BY_STEP[where]
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1)
    models = [lively_model("llama", dtype) for _ in range(ranks)]
    seen: list[list[T]] = [[] for _ in range(ranks)]

    def body(rank):
        def loss(output, stored):
            log_probs = token_log_probs(output.logits, stored["targets"])
            seen[rank].append(log_probs.detach())
            return (log_probs - stored["old"]).sum()

        policy = parallelize_model(
            models[rank],
            build_mesh("cpu", **sizes),
            loss=loss,
            count=lambda stored: (stored["targets"] != -100).sum(),
            num_microbatches=2,
            **options,
        )
        policy.module.eval()
        mask = torch.ones(4, 3, dtype=torch.long)
        mask[1, 0] = mask[3, :2] = 0 if padded else 1
        prompts = {"input_ids": torch.full((4, 3), 5) * mask, "attention_mask": mask}
        ids = generate(policy.module, **prompts, max_new_tokens=9, seed=1, eos_token_id=[])
        policy.module.train()
        targets, inputs = next_tokens(ids), {"input_ids": ids}
        if padded:
            mask = torch.nn.functional.pad(mask, (0, 9), value=1)
            inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        with torch.no_grad():
            outputs = policy.forward(**inputs)
            old = [
                token_log_probs(output.logits, wanted) for output, wanted in zip(outputs, targets.chunk(2), strict=True)
            ]
        loss_of_step = policy.step(**inputs, targets={"targets": targets, "old": torch.cat(old)})
        return old, float(loss_of_step)

    for rank, (old, total) in enumerate(run_ranks(ranks, body)):
        assert total == 0.0 and len(seen[rank]) == 2
        assert all(torch.equal(a, b) for a, b in zip(old, seen[rank], strict=True))
