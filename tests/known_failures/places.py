"""The kinds of models and the meshes of two ranks on which failures are rebuilt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.known_failures.failure import Place
from tests.matrix.features.adapters import lora as lora
from tests.matrix.kinds import KINDS, Kind
from tests.support.models import tiny_model

TP, DP, PP, CP = ({name: 2} for name in ("tp", "dp", "pp", "cp"))
SEQUENCE, SHARDED_LOGITS = {"sequence_parallel": True}, {"loss_parallel": True}


def _of_family(like: str, name: str, **fixed: Any) -> Kind:
    def build(**overrides: Any) -> nn.Module:
        return tiny_model(name, torch.float64, **{**fixed, **overrides})

    return replace(KINDS[like], build=build)


LLAMA, GPT2, MIXTURE, VIT, OWN = (KINDS[name] for name in ("llama", "gpt2", "mixture", "vit", "own"))
QWEN3, LATENT = _of_family("llama", "qwen3"), _of_family("mixture", "deepseek_v3")

ON_TP, ON_REGION = Place(TP), Place(TP, SEQUENCE)
ON_DP, ON_ZERO1, ON_ZERO2, ON_ZERO3 = (Place(DP, {"zero": zero}) for zero in range(4))
ON_CP, ON_PP = Place(CP), Place(PP, {"schedule": "1f1b"})
ON_EP = Place(DP, {"ep": 2}, MIXTURE)


def with_dropout(place: Place) -> Place:
    """The same place with a GPT-2 that drops out."""
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.2}
    return replace(place, kind=GPT2, overrides=rates, one_rank=True)
