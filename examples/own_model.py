"""A model of one's own, with a plan that is derived from its forward and proven before the first step.

torchrun --standalone --nproc-per-node 2 examples/own_model.py

On GPUs: build_mesh("cuda", dp=4, tp=2). To keep the plan, and to read it: `parallelize plans derive my_model:build`.
"""

import torch
import torch.nn.functional as F
from text import VOCABULARY, rows
from torch import nn
from torch.utils.data import DataLoader

import parallelize as p

WIDTH, HEADS, LAYERS, LENGTH = 64, 8, 2, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


mesh = p.build_mesh("cpu", tp=2)
torch.manual_seed(0)  # the same weights on every rank
model, data = Decoder(), rows(LENGTH)
plan = p.derive_plan(model, {"ids": data[0]["input_ids"][None]}).plan
parallel = p.parallelize_model(model, mesh, plan, sequence_parallel=True)
if mesh.get_rank() == 0:
    print(p.describe_plan(parallel.module))
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
batches = p.GlobalBatches(len(data), 16, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    ids = batch["input_ids"].to(mesh.device_type)
    loss = parallel.step(ids, targets=p.next_tokens(ids))
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
p.destroy_groups()
