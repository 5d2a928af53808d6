"""Documents packed in rows, in a decoder of one's own that calls `flex_attention`, over cp and tp.

torchrun --standalone --nproc-per-node 4 examples/flex_attention.py

On GPUs: build_mesh("cuda", dp=2, cp=2, tp=2), and `torch.compile(flex_attention)` in the attention. On CPUs PyTorch's
function has no gradients; under a plan it is computed by explicit matmuls.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from text import VOCABULARY, rows
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader

import parallelize as p

WIDTH, HEADS, LAYERS, LENGTH, WINDOW = 64, 8, 2, 256, 64
PLAN = Path(__file__).with_suffix(".yaml")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, x, block_mask):
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        slopes = self.slopes

        def nearer_is_more(score, b, h, i, j):  # heads and tokens are numbered as in one process
            return score + slopes[h] * (j - i)

        y = flex_attention(q, k, v, score_mod=nearer_is_more, block_mask=block_mask)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, block_mask):
        x = x + self.attn(self.norm1(x), block_mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, block_mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, block_mask)
        return self.head(self.norm(x))


def mask_of(documents):
    """A token attends to the last tokens of its document. documents: [batch, tokens], their numbers."""

    def visible(b, h, i, j):
        return (i >= j) & (i - j < WINDOW) & (documents[b, i] == documents[b, j])

    batch, length = documents.shape
    return create_block_mask(visible, batch, None, length, length, device=documents.device.type)


mesh = p.build_mesh("cpu", cp=2, tp=2)
torch.manual_seed(0)  # the same weights on every rank
parallel = p.parallelize_model(Decoder(), mesh, PLAN, sequence_parallel=True, loss_parallel=True)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
data = rows(LENGTH)
batches = p.GlobalBatches(len(data), 8, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    ids = batch["input_ids"].to(mesh.device_type)
    documents = (ids == ord("\n")).cumsum(1) // 4  # four lines are a document
    loss = parallel.step(ids, targets=p.next_tokens(ids), block_mask=mask_of(documents))  # full rows, on every rank
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 15:
        break
p.destroy_groups()
