"""A base in 4 bits, with LoRA on top (QLoRA): weights are quantized while they are read, and split over tp.

torchrun --standalone --nproc-per-node 2 examples/qlora.py

On GPUs: p.build_mesh("cuda", dp=2, tp=4), dtype=torch.bfloat16, and BASE a folder that `hf download` has written.
"""

import torch
from peft import LoraConfig, get_peft_model
from text import base_weights, new_folder, rows
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

import parallelize as p

mesh = p.build_mesh("cpu", tp=2)
BASE = base_weights()

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))
p.quantize(model, "nf4(block=16)")  # blocks of a small model; "nf4", in blocks of 64, for others
p.load_pretrained(model, BASE, mesh=mesh)  # codes and scales; no rank has the weights in full precision
set_seed(0)  # the same adapters on every rank
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
parallel = p.parallelize_model(model, mesh, sequence_parallel=True, loss_parallel=True)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)  # states of the adapters alone

data = [{name: ids.flip(0) for name, ids in row.items()} for row in rows()]  # a new task: the text backwards
batches = p.GlobalBatches(len(data), 16, mesh=mesh)
loader = DataLoader(data, batch_sampler=batches)
for step, batch in enumerate(batches.track(loader)):
    loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
p.save_adapter(parallel, new_folder("runs/qlora"))  # PEFT loads it on the same base, quantized or not
p.destroy_groups()
