"""Linears that no pair takes, sharded by themselves: column linears whose output is gathered.

A pair of a column and a row linear sends one sum for two matmuls, and what is between them stays sharded. A linear of
which something needs all of the output costs a collective of its own. So pairs come first, and this is for models of
which they shard little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.axes.tensor.watch.child_reads import reads_of_children
from parallelize.plan.dims.factor_analysis import FactorAnalysis, output_dim
from parallelize.plan.dims.factors import leaves, size_of
from parallelize.plan.pattern import generic

STYLE = "colwise(output=full)"
ENOUGH = 0.5
"""Of the parameters of layers: where pairs shard as much, other linears are left whole."""

_LEAST_FEATURES = 8
"""An output with fewer features is not worth a collective."""


def layer_share(model: nn.Module, styles: Mapping[str, str]) -> float:
    """Of the elements of parameters in layers, those that are sharded; of all parameters, where the model has no
    layers."""
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inside = {name: size for name, size in elements.items() if is_in_layer(name, model)} or elements
    sharded = sum(size for name, size in inside.items() if is_sharded(name, styles))
    return sharded / max(1, sum(inside.values()))


def is_sharded(parameter: str, styles: Mapping[str, str]) -> bool:
    """Whether the style of a parameter, or of its module, shards it."""
    style = styles.get(parameter, styles.get(parameter.rpartition(".")[0], "replicate"))
    return not style.startswith(("replicate", "sequence"))


def is_in_layer(parameter: str, model: nn.Module) -> bool:
    """Whether a parameter is in an item of a list, other than a list of tables."""
    owner = parameter.rpartition(".")[0]
    is_table = owner.rpartition(".")[2].isdigit() and isinstance(model.get_submodule(owner), nn.Embedding)
    return not is_table and any(segment.isdigit() for segment in parameter.split("."))


def gathered_linears(
    analysis: FactorAnalysis, model: nn.Module, styles: Mapping[str, str], partial: Set[str] = frozenset()
) -> dict[str, str]:
    """The styles of linears in layers that are sharded by themselves.

    Args:
        styles: of what is sharded already. partial: parameters of whose gradient each rank has a part.
    """
    return {
        name: STYLE
        for name in analysis.linears
        if not any(parent in styles for parent in _with_parents(name))
        and is_in_layer(f"{name}.weight", model)
        and f"{name}.weight" not in partial
        and not _is_read_by_parent(analysis, name)
        and _is_alone(analysis, name)
    }


def of_samples(analysis: FactorAnalysis, gathered: Mapping[str, str]) -> dict[str, str]:
    """Those that are called with one vector for each sample, as a layer's scales and shifts are computed from a time:
    their collective is as small as it is beside one of all tokens."""
    batches = {call.shape[0] for call in analysis.record.calls if call.shape[1] > 1}
    rows: dict[str, set[int]] = {}
    for matmul in analysis.record.contractions:
        rows.setdefault(matmul.module, set()).add(matmul.rows)
    return {name: style for name, style in gathered.items() if rows[name] <= batches}


def without_alike(gathered: Mapping[str, str], module: str) -> dict[str, str]:
    """Those that are not inside of a module that a failed proof names, in any layer."""
    block = generic(module)
    return {name: style for name, style in gathered.items() if not f"{generic(name)}.".startswith(f"{block}.")}


def _is_read_by_parent(analysis: FactorAnalysis, name: str) -> bool:
    """Whether the forward of the module above names a parameter of a linear, also in a branch that was not taken."""
    parent, _, child = name.rpartition(".")
    keys = {key for key, _ in analysis.linears[name].named_parameters()}
    cls: Any = type(analysis.modules[parent])
    return any(read.child == child and read.parameter in keys for read in reads_of_children(cls))


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _is_alone(analysis: FactorAnalysis, name: str) -> bool:
    """Whether a linear's own forward multiplies by its weight, nothing else reads that, and no operation inside needs
    all of the output."""
    record, weight = analysis.record, f"{name}.weight"
    dims = record.parameters.get(weight)
    if dims is None or list(record.first_names.values()).count(record.first_names[weight]) > 1:
        return False
    out = dims[output_dim(analysis.linears[name])]
    own = {f"{name}.{key}" for key, _ in analysis.linears[name].named_parameters()}
    mixed = {factor for mix in record.mixes if mix.module == name for factor in leaves(mix.dim)}
    return (
        size_of(out) >= _LEAST_FEATURES
        and any(matmul.weight == weight and matmul.module == name for matmul in record.contractions)
        and all(use.module == name for use in record.uses if own & use.weights)
        and all(matmul.module == name for matmul in record.contractions if matmul.weight in own)
        and mixed.isdisjoint(leaves(out))
    )


# -- unsharded linears -----------------------------------------------------------------------------------------------
# Matrices of layers that are not those of linears, and why they are not sharded: a plan says so of each.


def other_matrices(analysis: FactorAnalysis, model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """By module, why parameters of several dims that have no style are full on each rank.

    Args:
        styles: by the name of a module or parameter.
    """
    reasons: dict[str, str] = {}
    for name in analysis.record.parameters:
        owner = name.rpartition(".")[0]
        module = analysis.modules[owner]
        is_other = owner not in analysis.linears and not isinstance(module, nn.Embedding | ParametrizationList)
        if is_other and is_in_layer(name, model) and not _has_style(name, styles) and _is_matrix(analysis, name):
            reasons.setdefault(owner, _reason(analysis, name))
    return reasons


def _has_style(name: str, styles: Mapping[str, str]) -> bool:
    """Whether a parameter has a style, of its own or of its module, or is one of the experts whose module is around its
    own."""
    parts = name.split(".")
    around = (styles.get(".".join(parts[:end]), "") for end in range(1, len(parts)))
    return bool({name, ".".join(parts[:-1])} & styles.keys()) or any(style.startswith("experts") for style in around)


def _is_matrix(analysis: FactorAnalysis, name: str) -> bool:
    return sum(bool(dim) for dim in analysis.record.parameters[name]) > 1


def _reason(analysis: FactorAnalysis, name: str) -> str:
    """Of the largest dim what needs all of it."""
    dims = sorted(analysis.record.parameters[name], key=lambda dim: -size_of(dim))
    factors = [factor for dim in dims for part in analysis.parts_of(dim) for factor in part]
    blocked = [analysis.blocked[factor].reason for factor in factors if factor in analysis.blocked]
    kind = type(analysis.modules[name.rpartition(".")[0]]).__name__
    return blocked[0] if blocked else f"no linear sums over what {kind} computes with it"
