"""Rules of the vocabulary: the table of token embeddings, and the linear that returns logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallelize.plan.dims.classes import Classes, output_dim
from parallelize.plan.dims.factors import leaves


def vocabulary_rules(
    classes: Classes, fields: Mapping[str, int], styles: Mapping[str, str], logits: str
) -> dict[str, str]:
    """Styles by module. fields: of the config. styles: so far. logits: what the head returns, `vocabulary` or `full`."""
    tables = {
        name
        for lookup in classes.record.lookups
        if isinstance(classes.modules.get(name := lookup.table.rpartition(".")[0]), nn.Embedding)
        and lookup.of_tokens
        and _is_only_looked_up(classes, lookup.dim)
    }
    if not tables:
        return {}
    vocabulary = fields.get("vocab_size")
    sizes = {name: classes.modules[name].num_embeddings for name in tables}
    largest = max(tables, key=lambda name: (sizes[name] == vocabulary, sizes[name], name))
    rows = classes.modules[largest].num_embeddings
    sharded = {id(classes.modules[name].weight) for name in tables if sizes[name] == rows}
    embeddings = {name: module for name, module in classes.modules.items() if isinstance(module, nn.Embedding)}
    rules = {name: "embedding" for name, module in embeddings.items() if id(module.weight) in sharded}
    full = {id(module.weight) for name, module in embeddings.items() if name not in {*styles, *rules}}
    for name, linear in classes.linears.items():
        is_head = linear.weight.ndim == 2 and linear.weight.shape[output_dim(linear)] == rows
        # a tie with a table that is not sharded
        if name not in styles and is_head and id(linear.weight) not in full:
            rules[name] = f"colwise(output={logits})"
    return rules


def _is_only_looked_up(classes: Classes, dim: Any) -> bool:
    return not any(set(leaves(mix.dim)) & set(leaves(dim)) for mix in classes.record.mixes)
