"""The loop to copy, with its settings in a YAML file.

torchrun --standalone --nproc-per-node 4 examples/train.py examples/train.yaml
"""

import sys
from pathlib import Path

import torch
import yaml
from text import VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from parallelize import (
    Checkpointer,
    GlobalBatches,
    build_mesh,
    build_on_meta,
    destroy_groups,
    parallelize_model,
    save_pretrained,
)

settings = yaml.safe_load(Path(sys.argv[1]).read_text())
mesh = build_mesh(settings["device"], **settings["mesh"])
if settings["device"] == "cuda":
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
model = build_on_meta(LlamaForCausalLM, LlamaConfig(vocab_size=VOCABULARY, **settings["model"]))
parallel = parallelize_model(model, mesh, initialize=0, **settings["parallel"])  # or initialize="path/to/weights"
optimizer = parallel.optimizer(torch.optim.AdamW, **settings["optimizer"])
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=settings["warmup"])

data, size = rows(), settings["batch_size"]
train, held_out = data[:-64], data[-64:]
batches = GlobalBatches(len(train), size, seed=0, mesh=mesh)  # which samples this rank gets
loader = DataLoader(train, batch_sampler=batches, num_workers=1)
evaluation = DataLoader(held_out, batch_sampler=GlobalBatches(len(held_out), size, shuffle=False, mesh=mesh))

with Checkpointer(settings["folder"], parallel, optimizer=optimizer, scheduler=warmup, data=batches) as checkpoints:
    step = checkpoints.resume()  # 0 in an empty folder
    while step < settings["steps"]:
        for batch in batches.track(loader):
            loss = parallel.step(**batch)  # forward and backward; the mean over all data ranks, on every rank
            norm = parallel.clip_grad_norm_(settings["clip"])
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            step += 1
            if step % settings["evaluate_every"] == 0:
                parallel.module.eval()
                losses = [parallel.evaluate(**batch).item() for batch in evaluation]
                parallel.module.train()
                if mesh.get_rank() == 0:
                    print(f"step {step}  loss {loss:.4f}  norm {norm:.3f}  held out {sum(losses) / len(losses):.4f}")
            if step % settings["save_every"] == 0:
                checkpoints.save(step)
            if step == settings["steps"]:
                break
save_pretrained(parallel, Path(settings["folder"], "weights"))  # what transformers loads
destroy_groups()
