"""A vision transformer that learns to classify images, over tp; the head and its loss are those of `transformers`.

torchrun --standalone --nproc-per-node 2 examples/vision.py

On GPUs: build_mesh("cuda", dp=4, tp=2), dtype=torch.bfloat16, and `initialize=` a folder of pretrained weights.
"""

import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

from parallelize import GlobalBatches, build_mesh, build_on_meta, destroy_groups, parallelize_model

mesh = build_mesh("cpu", tp=2)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
config = ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes)
parallel = parallelize_model(build_on_meta(ViTForImageClassification, config), mesh, initialize=0)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)


def image(index: int) -> dict[str, torch.Tensor]:
    """Noise, brighter in one color: which one it is, is the label."""
    label = index % 3
    pixels = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
    pixels[label] += 0.5
    return {"pixel_values": pixels, "labels": torch.tensor(label)}


data = [image(index) for index in range(512)]
batches = GlobalBatches(len(data), 32, mesh=mesh)
step = 0
while step < 30:
    for batch in batches.track(DataLoader(data, batch_sampler=batches)):
        loss = parallel.step(**{name: tensor.to(mesh.device_type) for name, tensor in batch.items()})
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if mesh.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss:.4f}")
        if step == 30:
            break
destroy_groups()
