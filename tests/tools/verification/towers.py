"""A small model with a rule for each of its modules, as `verify` takes it."""

from __future__ import annotations

import threading

import torch
from torch import nn

RULES = {"norm": "replicate", "up": "colwise", "down": "rowwise", "head": "replicate"}


class Tower(nn.Module):
    def __init__(self, width: int = 12, inner: int = 18):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def tower(width: int = 12, cls: type[nn.Module] = Tower, **more):
    def inputs(batch, sequence):
        return {"x": torch.randn(batch, sequence, width), "targets": torch.randint(0, 7, (batch, sequence))}

    return {"model": cls(), "inputs": inputs, **more}


def on_a_rank() -> bool:
    return threading.current_thread() is not threading.main_thread()
