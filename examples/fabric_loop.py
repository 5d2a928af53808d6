"""Lightning Fabric with its ModelParallelStrategy: `parallelize_fn` is where the model is put on the mesh.

torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py
torchrun --standalone --nproc-per-node 4 examples/fabric_loop.py 2 2     # dp, tp
"""

import sys

import torch
from lightning_fabric import Fabric  # lightning.fabric is the same
from lightning_fabric.strategies import ModelParallelStrategy
from text import SIZES, VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from parallelize import GlobalBatches, build_mesh, build_optimizer, clip_grad_norm_, destroy_groups, parallelize_model

dp, tp = map(int, sys.argv[1:] or (2, 1))


def parallelize(model: torch.nn.Module, _: object) -> torch.nn.Module:
    """Fabric's mesh has the same ranks in the same order, under names of its own."""
    return parallelize_model(model, mesh, zero=2).module


fabric = Fabric(accelerator="cpu", devices=dp * tp, strategy=ModelParallelStrategy(parallelize, dp, tp))
fabric.launch()
mesh = build_mesh("cpu", dp=dp, tp=tp)
set_seed(0)
model = fabric.setup(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES)))
optimizer = fabric.setup_optimizers(build_optimizer(model.module, torch.optim.AdamW, lr=3e-3))
data = rows()
batches = GlobalBatches(len(data), 16, mesh=mesh)
loader = fabric.setup_dataloaders(DataLoader(data, batch_sampler=batches), use_distributed_sampler=False)

for step, batch in enumerate(loader, start=1):
    loss = model(**batch).loss  # this data rank's part of the mean over all of them
    fabric.backward(loss)
    clip_grad_norm_(model.module, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        total = fabric.all_reduce(loss.detach(), reduce_op="sum") / tp
        fabric.print(f"step {step}  loss {total:.4f}")
    if step == 20:
        break
destroy_groups()
