"""Matrices of layers that are not those of linears, and why they are not sharded: a plan says so of each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.plan.dims.classes import Classes
from parallelize.plan.dims.factors import size_of
from parallelize.tools.derivation.gathered_linears import is_in_layer


def other_matrices(classes: Classes, model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """By module, why parameters of several dims that have no style are full on each rank.

    Args:
        styles: by the name of a module or parameter.
    """
    reasons: dict[str, str] = {}
    for name in classes.record.parameters:
        owner = name.rpartition(".")[0]
        module = classes.modules[owner]
        is_other = owner not in classes.linears and not isinstance(module, nn.Embedding | ParametrizationList)
        if is_other and is_in_layer(name, model) and not _has_style(name, styles) and _is_matrix(classes, name):
            reasons.setdefault(owner, _reason(classes, name))
    return reasons


def _has_style(name: str, styles: Mapping[str, str]) -> bool:
    """Whether a parameter has a style, of its own or of its module, or is one of the experts whose module is around its own."""
    parts = name.split(".")
    around = (styles.get(".".join(parts[:end]), "") for end in range(1, len(parts)))
    return bool({name, ".".join(parts[:-1])} & styles.keys()) or any(style.startswith("experts") for style in around)


def _is_matrix(classes: Classes, name: str) -> bool:
    return sum(bool(dim) for dim in classes.record.parameters[name]) > 1


def _reason(classes: Classes, name: str) -> str:
    """Of the largest dim what needs all of it."""
    dims = sorted(classes.record.parameters[name], key=lambda dim: -size_of(dim))
    factors = [factor for dim in dims for part in classes.parts_of(dim) for factor in part]
    blocked = [classes.blocked[factor].reason for factor in factors if factor in classes.blocked]
    kind = type(classes.modules[name.rpartition(".")[0]]).__name__
    return blocked[0] if blocked else f"no linear sums over what {kind} computes with it"
