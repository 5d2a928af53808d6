"""Pretraining: the loop to copy, with its settings in the YAML file beside it, or in one that is named.

torchrun --standalone --nproc-per-node 2 examples/pretrain.py

On GPUs: `device: cuda` in examples/pretrain.yaml, and its mesh, such as {dp: 4, tp: 8} on 32 of them.
"""

import sys
from pathlib import Path

import torch
import yaml
from text import VOCABULARY, rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import parallelize as p


def main(settings: dict) -> None:
    mesh = p.build_mesh(settings["device"], **settings["mesh"])
    model = p.build_on_meta(LlamaForCausalLM, LlamaConfig(vocab_size=VOCABULARY, **settings["model"]))
    parallel = p.parallelize_model(model, mesh, initialize=0, **settings["parallel"])  # or initialize="path/to/weights"
    optimizer = parallel.optimizer(torch.optim.AdamW, **settings["optimizer"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=settings["warmup"])

    data, size = rows(), settings["batch_size"]
    train, held_out = data[:-64], data[-64:]
    batches = p.GlobalBatches(len(train), size, seed=0, mesh=mesh)  # which samples this rank gets
    loader = DataLoader(train, batch_sampler=batches, num_workers=1)
    evaluation = DataLoader(held_out, batch_sampler=p.GlobalBatches(len(held_out), size, shuffle=False, mesh=mesh))

    with p.Checkpointer(
        settings["folder"], parallel, optimizer=optimizer, scheduler=schedule, data=batches
    ) as checkpoints:
        step = checkpoints.resume()  # 0 in an empty folder
        while step < settings["steps"]:
            for batch in batches.track(loader):
                loss = parallel.step(**to_device(batch, mesh))  # forward and backward; the mean over all data ranks
                norm = parallel.clip_grad_norm_(settings["clip"])
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                if step % settings["evaluate_every"] == 0:
                    parallel.module.eval()
                    losses = [parallel.evaluate(**to_device(batch, mesh)).item() for batch in evaluation]
                    parallel.module.train()
                    if mesh.get_rank() == 0:
                        print(
                            f"step {step}  loss {loss:.4f}  norm {norm:.3f}  held out {sum(losses) / len(losses):.4f}"
                        )
                if step % settings["save_every"] == 0:
                    checkpoints.save(step)
                if step == settings["steps"]:
                    break
    p.save_pretrained(parallel, Path(settings["folder"], f"weights-{step}"))  # what transformers loads
    p.destroy_groups()


def to_device(batch: dict, mesh: object) -> dict:
    return {name: tensor.to(mesh.device_type) for name, tensor in batch.items()}


if __name__ == "__main__":  # workers of the loader import this file
    file = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".yaml")
    main(yaml.safe_load(file.read_text()))
