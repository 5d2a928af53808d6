"""A mixture of experts: each data rank has half of the experts, and ranks exchange tokens (expert parallelism).

torchrun --standalone --nproc-per-node 2 examples/mixture.py

On GPUs: build_mesh("cuda", dp=8) with ep=8, dtype=torch.bfloat16, and `initialize=` a folder of pretrained weights.
`ep` is no axis of the mesh: experts are divided over ranks of dp, cp and tp.
"""

import torch
from text import VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from parallelize import GlobalBatches, build_mesh, build_on_meta, destroy_groups, parallelize_model

mesh = build_mesh("cpu", dp=2)
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
experts = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)  # with its load-balancing loss
config = MixtralConfig(vocab_size=VOCABULARY, **sizes, **experts)
parallel = parallelize_model(build_on_meta(MixtralForCausalLM, config), mesh, ep=mesh.size(), zero=1, initialize=0)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)

data = rows()
batches = GlobalBatches(len(data), 16, mesh=mesh)
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")
    if step == 20:
        break
destroy_groups()
