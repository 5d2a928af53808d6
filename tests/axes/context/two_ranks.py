"""Models over two ranks of cp, their outputs, and their errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, build_mesh, context_parallel, gather_sequence
from tests.support.context import family
from tests.support.threads import run_ranks

IDS = torch.arange(3, 15).view(2, 6)


def over_cp(model, **options):
    return context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2), own_reduction=True, **options)


def refused(slug, model, *args, kind=ModelError, **inputs):
    def body(rank):
        with pytest.raises(kind, match=slug):
            over_cp(model)(*args, **inputs)

    run_ranks(2, body)


def outputs(model, **inputs):
    """Logits of both, whole."""
    expected = model(**inputs, **({} if "bert" in type(model).__name__.lower() else {"use_cache": False})).logits

    def body(rank):
        parallel = over_cp(model)
        return gather_sequence(parallel, parallel(**inputs).logits)

    return run_ranks(2, body)[0].detach(), expected.detach()


def llama_head(name, **config):
    import transformers

    made = family("llama").config
    for key, value in config.items():
        setattr(made, key, value)
    return getattr(transformers, name)(made).double()


class WithStockAttention(nn.Module):
    """A planned block, and then attention of PyTorch's module."""

    def __init__(self, other):
        super().__init__()
        self.q, self.other = nn.Linear(8, 8), other

    def forward(self, x, places=None, *extra, more=None):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return x if places is None else x + places.unsqueeze(-1)
