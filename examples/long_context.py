"""Long sequences over cp: each rank has half of every sequence, and keys and values travel around a ring.

torchrun --standalone --nproc-per-node 2 examples/long_context.py

On GPUs: build_mesh("cuda", cp=8) with LENGTH = 131072, dtype=torch.bfloat16 and `initialize=` a folder of pretrained
weights. With ulysses=8 ranks exchange heads instead, which suits the fast links inside of a node.
"""

import torch
from text import SIZES, VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from parallelize import GlobalBatches, build_mesh, build_on_meta, destroy_groups, parallelize_model

LENGTH = 512
mesh = build_mesh("cpu", cp=2)
config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SIZES)
model = build_on_meta(LlamaForCausalLM, config)
parallel = parallelize_model(model, mesh, recompute="full", fuse_loss=True, initialize=0)  # logits are never stored
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)

data = rows(LENGTH)  # full sequences: each rank takes its own tokens of them
batches = GlobalBatches(len(data), 4, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 4 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 12:
        break
destroy_groups()
