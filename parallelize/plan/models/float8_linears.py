"""Linears of torchao that compute in float8 from a weight that they keep in its dtype
(`convert_to_float8_training`)."""

from __future__ import annotations

from torch import nn


def is_float8_linear(module: nn.Module) -> bool:
    """Whether a module is one: recognized by the name of its class, so that torchao is not imported."""
    return any(kind.__name__ == "Float8Linear" and "float8" in kind.__module__ for kind in type(module).__mro__)


def as_plain_linears(model: nn.Module) -> nn.Module:
    """The same module, whose linears compute in the dtype of their weights: for records of shapes, and for comparisons.

    What float8 adds is rounding, which no plan decides.
    """
    for module in model.modules():
        if is_float8_linear(module):
            module.__class__ = nn.Linear
    return model
