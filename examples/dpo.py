"""Preference training (DPO): the policy and a frozen copy of it, on one mesh, with logits that stay sharded.

torchrun --standalone --nproc-per-node 2 examples/dpo.py

On GPUs: build_mesh("cuda", dp=2, tp=4), dtype=torch.bfloat16, and BASE a folder that `hf download` has written.
"""

import torch
import torch.nn.functional as F
from text import base_weights, rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from parallelize import GlobalBatches, build_mesh, destroy_groups, next_tokens, parallelize_model, sequence_log_probs

BATCH, BETA = 8, 0.1  # pairs of a step, over all data ranks
mesh = build_mesh("cpu", tp=2)
BASE = base_weights()


def planned():
    return parallelize_model(AutoModelForCausalLM.from_pretrained(BASE), mesh, loss_parallel=True)


policy, reference = planned(), planned()
reference.module.requires_grad_(False).eval()
optimizer = policy.optimizer(torch.optim.AdamW, lr=1e-3)


def log_probs(model, ids):
    """Of each row: the sum of the log-probabilities of its tokens, [rows]."""
    return sequence_log_probs(model(input_ids=ids).logits, next_tokens(ids), mesh)


def pair(row):
    """What is preferred, and what is not: here a line of the text, and the same tokens the other way around."""
    return {"chosen": row["input_ids"], "rejected": row["input_ids"].flip(0)}


data = [pair(row) for row in rows(32)]
batches = GlobalBatches(len(data), BATCH, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    ids = torch.cat([batch["chosen"], batch["rejected"]]).to(mesh.device_type)  # one forward for both
    with torch.no_grad():
        theirs = log_probs(reference.module, ids)
    chosen, rejected = (log_probs(policy.module, ids) - theirs).chunk(2)
    loss = -F.logsigmoid(BETA * (chosen - rejected)).sum() / BATCH  # this data rank's part of the mean
    loss.backward()
    policy.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
destroy_groups()
