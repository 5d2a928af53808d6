"""LoRA of PEFT on a model that is sharded over tp: only the adapters train, and only they are saved.

torchrun --standalone --nproc-per-node 2 examples/lora.py

On GPUs: build_mesh("cuda", dp=2, tp=4), dtype=torch.bfloat16, and BASE a folder that `hf download` has written.
"""

import torch
from peft import LoraConfig, get_peft_model
from text import base_weights, new_folder, rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed

from parallelize import GlobalBatches, build_mesh, destroy_groups, parallelize_model, save_adapter

mesh = build_mesh("cpu", tp=2)
BASE = base_weights()

set_seed(0)  # the same adapters on every rank
model = AutoModelForCausalLM.from_pretrained(BASE)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
parallel = parallelize_model(model, mesh, sequence_parallel=True, loss_parallel=True)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)  # states of the adapters alone

data = [{name: ids.flip(0) for name, ids in row.items()} for row in rows()]  # a new task: the text backwards
batches = GlobalBatches(len(data), 16, mesh=mesh)
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
save_adapter(parallel, new_folder("runs/lora"))  # adapter_config.json and adapter_model.safetensors, which PEFT loads
destroy_groups()
