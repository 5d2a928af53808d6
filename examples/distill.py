"""Distillation: a small student learns the distribution of a larger teacher; the logits of neither are ever stored.

torchrun --standalone --nproc-per-node 2 examples/distill.py

On GPUs: build_mesh("cuda", dp=2, tp=4), dtype=torch.bfloat16, and BASE a folder that `hf download` has written.
"""

import torch
from text import SIZES, VOCABULARY, base_weights, rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from parallelize import GlobalBatches, build_mesh, destroy_groups, distillation_loss, next_tokens, parallelize_model

BATCH, TEMPERATURE = 16, 2.0  # sequences of a step, over all data ranks
mesh = build_mesh("cpu", tp=2)
BASE = base_weights()
set_seed(0)
small = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **{**SIZES, "hidden_size": 32, "num_hidden_layers": 2}))

student = parallelize_model(small, mesh, fuse_loss=True)
teacher = parallelize_model(AutoModelForCausalLM.from_pretrained(BASE), mesh, fuse_loss=True).module
teacher.requires_grad_(False).eval()
optimizer = student.optimizer(torch.optim.AdamW, lr=3e-3)

data = rows()
batches = GlobalBatches(len(data), BATCH, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    ids = batch["input_ids"].to(mesh.device_type)
    with torch.no_grad():
        theirs = teacher(input_ids=ids).logits
    loss = distillation_loss(
        student.module(input_ids=ids).logits,
        theirs,
        divergence="forward_kl",  # "reverse_kl" and "jsd" too
        temperature=TEMPERATURE,
        targets=next_tokens(ids),  # the last token of a row has none, and does not count
        mesh=mesh,
    )
    loss.backward()
    student.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 8 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 32:
        break
destroy_groups()
