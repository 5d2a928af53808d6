"""What the examples train on: the source of Python's argparse, in rows of bytes, each of which is a token."""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

VOCABULARY = 256
SIZES = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)


def rows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Samples with `input_ids` and `labels`, as stock models take them: equal, and shifted inside of the model."""
    tokens = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return [{"input_ids": ids, "labels": ids} for ids in tokens[: len(tokens) // length * length].view(-1, length)]


def base_weights(folder: str = "runs/base") -> str:
    """A folder that stands for pretrained weights: a small Llama that has seen some of the text, saved by
    `transformers`. Call it on every rank, after `build_mesh`."""
    if dist.get_rank() == 0 and not Path(folder).exists():
        set_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for batch in DataLoader(rows(32)[:480], batch_size=16):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
    dist.barrier()
    return folder


def new_folder(name: str) -> str:
    """`name`, or `name-2` and so on where that exists, the same on every rank: weights are never written over."""
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    chosen = [next(name for name in names if not Path(name).exists())]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]
