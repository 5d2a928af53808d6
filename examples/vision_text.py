"""Texts with images over cp: a LLaVA learns to name colors. Each rank has half of every text's tokens, and half of the
images: what the tower returns for them is gathered, and takes the places of their tokens.

torchrun --standalone --nproc-per-node 2 examples/vision_text.py

On GPUs: build_mesh("cuda", cp=4, tp=2), dtype=torch.bfloat16, and a pretrained model in the place of this one. A
pipeline takes the same batches (pp=2, num_microbatches=4): each microbatch gets the images of its texts.
"""

import torch
from torch.utils.data import DataLoader
from transformers import LlavaConfig, LlavaForConditionalGeneration

from parallelize import GlobalBatches, build_mesh, destroy_groups, parallelize_model

IMAGE, LENGTH, COLORS = 60, 32, (10, 11, 12)  # the id of an image's tokens; ids of the names of colors
mesh = build_mesh("cpu", cp=2)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
config = LlavaConfig(
    text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes},
    vision_config={"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **sizes},
    image_token_id=IMAGE,
)
torch.manual_seed(0)  # all ranks begin with the same weights
parallel = parallelize_model(LlavaForConditionalGeneration(config), mesh)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)


def sample(index: int) -> dict[str, torch.Tensor]:
    """A text with an image, brighter in one color, and the name of this color after each of the next tokens."""
    generator, color = torch.Generator().manual_seed(index), index % 3
    ids = torch.randint(20, 50, (LENGTH,), generator=generator)
    ids[1:17] = IMAGE  # 16 patches
    ids[18::2] = COLORS[color]
    pixels = torch.randn(3, 32, 32, generator=generator)
    pixels[color] += 1.0
    labels = torch.where(ids == COLORS[color], ids, -100)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}


data = [sample(index) for index in range(256)]
batches = GlobalBatches(len(data), 16, mesh=mesh)
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
