"""What to change in a forward whose linears were left whole because the proof failed with them sharded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parallelize.axes.tensor.input_widths import advice_on_widths
from parallelize.plan.dims.classes import PROOF_FAILED


def with_advice(model: nn.Module, whole: Mapping[str, str]) -> dict[str, str]:
    """The reasons by linear, with the line and the edit where the forward around a linear takes the width of a head from its input."""
    return {name: _advised(model, name, reason) for name, reason in whole.items()}


def _advised(model: nn.Module, name: str, reason: str) -> str:
    advice = advice_on_widths(type(model.get_submodule(name.rpartition(".")[0]))) if reason == PROOF_FAILED else ""
    return advice or reason
