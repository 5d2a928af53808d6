"""What the examples train on: the source of Python's argparse, in rows of bytes, each of which is a token."""

import argparse
from pathlib import Path

import torch

VOCABULARY = 256
SIZES = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)


def rows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Samples with `input_ids` and `labels`, as stock models take them: equal, and shifted inside of the model."""
    tokens = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return [{"input_ids": ids, "labels": ids} for ids in tokens[: len(tokens) // length * length].view(-1, length)]
