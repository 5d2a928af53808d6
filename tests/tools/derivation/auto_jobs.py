"""What ranks run for test_auto.py: a model by `plan="auto"`, compared with the unsharded one."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_model, parallelize_module
from tests.support.models import perturb
from tests.tools.derivation.own_models import TinyGpt


def own_model() -> nn.Module:
    """A plain module: no plan, no config."""
    return TinyGpt()


def own_type() -> nn.Module:
    """A model of `transformers` without a shipped plan, and without one of its own."""
    from transformers import BioGptConfig, BioGptForCausalLM

    sizes = {
        "vocab_size": 53,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
    }
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BioGptForCausalLM(BioGptConfig(**sizes, **no_dropout))


MAKERS = {"own_model": own_model, "own_type": own_type}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(rank: int, maker: str) -> dict[str, Any]:
    """The largest differences from the unsharded model, the rules, and what was logged and changed on this rank."""
    mesh = build_mesh("cpu", tp=2)
    torch.manual_seed(5)
    reference = MAKERS[maker]().double()
    perturb(reference)
    model, ids = copy.deepcopy(reference), torch.randint(53, (2, 11))
    torch.manual_seed(rank)  # ranks whose generators differ derive the same plan
    random.seed(rank)
    before = torch.get_rng_state(), random.getstate()
    handler, log = _Lines(), logging.getLogger("parallelize")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        parallelize_module(model, mesh, "auto")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    is_alone = torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    expected, out = _logits(reference(ids)), _logits(model(ids))
    for logits in (expected, out):
        logits.sin().sum().backward()
    gradients = full_gradients(model)
    stock = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return {
        "lines": [line for line in handler.lines if "derived" in line],
        "generator": is_alone,
        "sharded": sorted(n for n, p in model.named_parameters() if p.to_local().numel() < p.numel()),
        "names": (sorted(gradients), sorted(stock)),
        "output": float((out - expected).abs().max() / expected.abs().max()),
        "gradients": max(
            float((gradients[name] - grad).abs().max() / max(grad.abs().max(), 1e-3)) for name, grad in stock.items()
        ),
    }


def _logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def on_data_ranks(rank: int) -> list[str]:
    """On a mesh without `tp` nothing is derived: the forward of this model cannot be recorded."""
    mesh = build_mesh("cpu", dp=2)
    torch.manual_seed(5)
    parallelize_model(nn.Sequential(nn.Linear(4, 3)), mesh, "auto")
    return []
