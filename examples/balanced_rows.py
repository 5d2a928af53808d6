"""Documents of very different lengths: each data rank and microbatch gets what costs as much to compute.

torchrun --standalone --nproc-per-node 2 examples/balanced_rows.py

On GPUs: build_mesh("cuda", dp=8) with dtype=torch.bfloat16, explain(config, mesh="dp=8") and `initialize=` a folder
of pretrained weights. Attention makes one long document cost more than many short ones with as many tokens. `explain`
finds what a token and a squared token cost. Global batches are dealt by it, documents are joined to one row for each
microbatch, and the step cuts each row to its own length. The gradients are those of the same documents in any order.
"""

import math
import random

import torch
from text import VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from parallelize import (
    GlobalBatches,
    JoinedRows,
    LoadRecord,
    build_mesh,
    build_on_meta,
    collate_rows,
    destroy_groups,
    explain,
    parallelize_model,
)

sizes = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
config = LlamaConfig(vocab_size=VOCABULARY, **sizes)

tokens, draw, documents = torch.cat([row["input_ids"] for row in rows()]), random.Random(0), []
while len(documents) < 1280:  # log-normal lengths, as in most sets for fine-tuning
    length = min(512, max(8, int(math.exp(draw.gauss(4.0, 0.9)))))
    first = draw.randrange(len(tokens) - length)
    documents.append(tokens[first : first + length])
data = JoinedRows(documents)

# before there are ranks: what rows cost, and what dealing them brings on the mesh of a run to come
record = LoadRecord(data.lengths, samples=64, joined=True, lockstep=True)
balance = explain(config, mesh="dp=4", sequence=512, num_microbatches=1, record=record).balance

mesh = build_mesh("cpu", dp=2)
model = build_on_meta(LlamaForCausalLM, config)
parallel = parallelize_model(model, mesh, zero=1, initialize=0, num_microbatches=2)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
costs = balance.row_costs.of(data.lengths)
batches = GlobalBatches(len(data), 64, mesh=mesh, costs=costs, num_microbatches=2, joined=True, lockstep=True)
if mesh.get_rank() == 0:
    line = balance["rows"]
    print(f"balance of 4 data ranks, in order of the data: {line.before:.3f}, dealt by costs: {line.after:.3f}")

loader = DataLoader(data, batch_sampler=batches, collate_fn=collate_rows)
for step, batch in enumerate(batches.track(loader), start=1):
    loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
destroy_groups()
