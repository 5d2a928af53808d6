"""Fine-tuning all weights of a pretrained model, with ZeRO 3 and recomputed layers.

torchrun --standalone --nproc-per-node 2 examples/finetune.py

On GPUs: build_mesh("cuda", dp=8), dtype=torch.bfloat16, and BASE a folder that `hf download` has written. The plan is
that of the folder's model type. A model whose layers do not fit one GPU gets tp too: build_mesh("cuda", dp=4, tp=2).
"""

import torch
from text import base_weights, new_folder, rows
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from parallelize import FittedRows, GlobalBatches, build_mesh, destroy_groups, parallelize_model, save_pretrained

mesh = build_mesh("cpu", dp=2)
BASE = base_weights()

with torch.device("meta"):  # no rank ever has the full model
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))
parallel = parallelize_model(model, mesh, zero=3, recompute="full", initialize=BASE)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3, weight_decay=0.0)

documents = []  # a prompt, whose labels are -100, and an answer; documents stay whole
for row in rows(48)[:128]:
    labels = row["input_ids"].clone()
    labels[:16] = -100
    documents.append({"input_ids": row["input_ids"], "labels": labels})
data = FittedRows(documents, 96, pad_id=0)
batches = GlobalBatches(len(data), 8, mesh=mesh)
loader = DataLoader(data, batch_sampler=batches)

step = 0
for _ in range(3):  # epochs
    for batch in batches.track(loader):
        loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if mesh.get_rank() == 0 and step % 8 == 0:
            print(f"step {step}  loss {loss:.4f}")
save_pretrained(parallel, new_folder("runs/finetuned"))  # from_pretrained loads it
destroy_groups()
