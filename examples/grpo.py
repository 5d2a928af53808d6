"""Reinforcement learning with a verifiable reward (GRPO, arXiv:2402.03300): one planned model generates and trains.

torchrun --standalone --nproc-per-node 2 examples/grpo.py

On GPUs: build_mesh("cuda", dp=2, tp=4), dtype=torch.bfloat16, and BASE a folder that `hf download` has written. With
zero=3, every data rank must run as many forwards as the others: pass eos_token_id=[] to `generate`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import base_weights, rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from parallelize import (
    GlobalBatches,
    build_mesh,
    destroy_groups,
    generate,
    next_tokens,
    parallelize_model,
    token_log_probs,
)

PROMPTS, GROUP, NEW = 8, 8, 12  # prompts of a step over all data ranks, answers of each, and their longest length
UPDATES, CLIP, BETA = 2, 0.2, 0.04  # of each batch of answers; of the ratio; of the KL divergence to the reference
END = 10  # the id that ends an answer: here a line break
mesh = build_mesh("cpu", dp=2)
BASE = base_weights()


def grpo_loss(output, stored):
    """The sum over a microbatch's answers of their mean over tokens."""
    counted = stored["targets"] != -100
    log_probs = token_log_probs(output.logits, stored["targets"])
    ratio = (log_probs - stored["old"]).exp()
    advantages = stored["advantages"].unsqueeze(1)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    to_reference = stored["reference"] - log_probs
    kl = to_reference.exp() - to_reference - 1
    return -((gain - BETA * kl) * counted).sum(1).div(counted.sum(1)).sum()


def planned(**options):
    return parallelize_model(AutoModelForCausalLM.from_pretrained(BASE), mesh, loss_parallel=True, **options)


policy = planned(zero=2, loss=grpo_loss, count=lambda stored: len(stored["targets"]))
reference = planned()
reference.module.requires_grad_(False)
optimizer = policy.optimizer(torch.optim.AdamW, lr=1e-3)


def answered(prompts, indices, step):
    """GROUP answers to each prompt, [rows, prompt + NEW]. What a row draws depends on its index in the data and on the
    step, not on the rank."""
    members = (indices[:, None] * GROUP + torch.arange(GROUP)).flatten()
    policy.module.eval()
    ids = generate(
        policy.module,
        prompts.repeat_interleave(GROUP, 0),
        max_new_tokens=NEW,
        seed=step,
        rows=members,
        eos_token_id=END,
        pad_token_id=END,
    )
    policy.module.train()
    return F.pad(ids, (0, prompts.shape[1] + NEW - ids.shape[1]), value=END)  # where all rows have ended early


def rewards_of(answers):
    """[rows]: the share of lower-case letters. In its place: whether a result is right, a test passes, ..."""
    return ((answers >= ord("a")) & (answers <= ord("z"))).float().mean(1)


def log_probs(model, ids, targets):
    """Of each token, [rows, tokens], by the forwards that `step` computes too: the first ratio is exactly 1."""
    outputs = model.forward(input_ids=ids)  # one for each microbatch
    with torch.no_grad():
        parts = zip(outputs, targets.chunk(len(outputs)), strict=True)
        return torch.cat([token_log_probs(out.logits, wanted) for out, wanted in parts])


data = [{"index": index, "prompt": row["input_ids"]} for index, row in enumerate(rows(16))]
batches = GlobalBatches(len(data), PROMPTS, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    prompts = batch["prompt"].to(mesh.device_type)
    ids = answered(prompts, batch["index"], step)
    answers = ids[:, prompts.shape[1] :]
    rewards = rewards_of(answers)
    groups = rewards.view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

    targets = next_tokens(ids)  # an answer's tokens up to its end
    after_end = (answers == END).cumsum(1) - (answers == END).long() > 0
    targets[:, : prompts.shape[1] - 1] = -100
    targets[:, prompts.shape[1] - 1 : -1].masked_fill_(after_end, -100)
    stored = {"targets": targets, "advantages": advantages.flatten()}
    stored |= {"old": log_probs(policy, ids, targets), "reference": log_probs(reference, ids, targets)}
    for _ in range(UPDATES):
        policy.step(input_ids=ids, targets=stored)
        policy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    mean = rewards.mean() / mesh.size()
    dist.all_reduce(mean)  # ranks of one data rank have the same
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  reward {mean:.4f}")
    if step == 20:
        break
destroy_groups()
