"""accelerate beside a model on a mesh: it finds the device, prints and tracks. Model, loader and schedule are not
prepared.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import sys

import torch
from accelerate import Accelerator
from text import SIZES, VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from parallelize import GlobalBatches, build_mesh, destroy_groups, parallelize_model

MESH = sys.argv[1] if sys.argv[1:] else "dp=2"
axes = {name: int(size) for name, size in (axis.split("=") for axis in MESH.split(","))}
accelerator = Accelerator(cpu=True)
mesh = build_mesh("cpu", **axes)
set_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
parallel = parallelize_model(model, mesh)  # in place of accelerator.prepare(model)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
data = rows()
loader = DataLoader(data, batch_sampler=GlobalBatches(len(data), 16, mesh=mesh))  # of accelerator.prepare(loader)

for step, batch in enumerate(loader, start=1):
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    with accelerator.autocast():
        loss = parallel.step(**batch)  # of accelerator.backward(loss)
    parallel.clip_grad_norm_(1.0)  # of accelerator.clip_grad_norm_
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
destroy_groups()
