"""Rules of a derived plan under a plan file's patterns: `*` for layers, braces for siblings of one style.

Torch-free.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import takewhile
from math import prod
from typing import Any

from torch import nn

from parallelize.base.files.yaml_nodes import MAX_SCALAR
from parallelize.plan.dims.factor_analysis import FactorAnalysis, output_dim
from parallelize.plan.dims.factors import leaves
from parallelize.plan.model_facts import describe
from parallelize.plan.pattern import alternatives, generic
from parallelize.tools.derivation.region_search import PARTIAL_GRADIENT


def pattern_rules(styles: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The styles by pattern, in the order of `names`.

    Args:
        styles: by name. names: all names of the model that a pattern may match, in its order.
    """
    order = {name: index for index, name in enumerate(names)}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in order:
        groups[generic(name)].append(name)
    rules: dict[str, str] = {}
    for pattern, members in groups.items():
        values = {styles.get(name, "") for name in members}
        if len(values) == 1:
            rules |= dict.fromkeys([pattern] if "" not in values else [], values.pop())
        else:
            rules |= _rules_by_style(pattern, members, styles)
    return _merged(rules)


def _rules_by_style(pattern: str, members: list[str], styles: Mapping[str, str]) -> dict[str, str]:
    """Rules for a pattern whose members differ: one for each style, which lists layers where one number differs.

    A number that takes all of its values stays `*`: the plan serves models with more layers.
    """
    every = [name.split(".") for name in members]
    rules: dict[str, str] = {}
    for style in dict.fromkeys(styles.get(name, "") for name in members):
        chosen = [name.split(".") for name in members if styles.get(name, "") == style]
        columns = [sorted({parts[i] for parts in chosen}, key=_number) for i in range(len(chosen[0]))]
        if not style:
            continue
        pattern = ".".join(_segments(columns, every))
        if len(chosen) == prod(map(len, columns)) and len(pattern) <= MAX_SCALAR:
            rules[pattern] = style
        else:
            rules |= {".".join(parts): style for parts in chosen}
    return rules


def _segments(columns: list[list[str]], names: list[list[str]]) -> Iterator[str]:
    """The values that each segment takes, of those that it has in names whose segments before it are chosen: a stage
    may have few layers."""
    for index, column in enumerate(columns):
        every = {parts[index] for parts in names}
        names = [parts for parts in names if parts[index] in column]
        if len(column) == 1 and not (column[0].isdigit() and every == {column[0]}):
            yield column[0]
        else:
            yield "*" if set(column) == every else "{" + ",".join(column) + "}"


def _number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (-1, text)


def _merged(rules: dict[str, str]) -> dict[str, str]:
    """Siblings of one style in one pattern, where its key in the file needs no quotes; blocks stay by themselves."""
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for pattern, style in rules.items():
        parent, _, name = pattern.rpartition(".")
        siblings[parent, style].append(name)
    merged: dict[str, str] = {}
    for (parent, style), names in siblings.items():
        together = braces(names)
        is_plain = not any("{" in name or "*" in name for name in names) and not style.startswith("gather")
        is_plain = is_plain and len(parent) + len(together) < MAX_SCALAR
        needs_quotes = together.startswith("{") and parent == _layer_of(f"{parent}.x")
        for name in [together] if is_plain and not needs_quotes else names:
            merged[f"{parent}.{name}" if parent else name] = style
    order = {pattern: index for index, pattern in enumerate(rules)}
    first = {name: min(order.get(part, len(order)) for part in (name, *alternatives(name))) for name in merged}
    return dict(sorted(merged.items(), key=lambda item: first[item[0]]))


def braces(names: list[str]) -> str:
    """`{q,k}_proj` for `q_proj` and `k_proj`."""
    if len(names) == 1:
        return names[0]
    suffix = _common_start([name[::-1] for name in names])[::-1]
    suffix = suffix[suffix.find("_") :] if "_" in suffix else ""
    prefix = _common_start([name[: len(name) - len(suffix)] for name in names])
    if not prefix.endswith("_") and not all(
        re.fullmatch(r"\d+", name[len(prefix) : len(name) - len(suffix)]) for name in names
    ):
        prefix = prefix[: prefix.rfind("_") + 1]
    middles = [name[len(prefix) : len(name) - len(suffix)] for name in names]
    return prefix + "{" + ",".join(middles) + "}" + suffix if all(middles) else "{" + ",".join(names) + "}"


def _common_start(names: list[str]) -> str:
    return "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    )


def nested(rules: Mapping[str, str]) -> dict[str, str | dict[str, str]]:
    """Rules of one layer under its pattern, where there are several."""
    heads: dict[str, int] = defaultdict(int)
    for pattern in rules:
        heads[_layer_of(pattern)] += 1
    tree: dict[str, str | dict[str, str]] = {}
    for pattern, style in rules.items():
        head = _layer_of(pattern)
        if head and heads[head] > 1 and head not in rules:  # a key has a style or rules of its own, not both
            inner = tree.setdefault(head, {})
            assert isinstance(inner, dict)
            inner[pattern.removeprefix(head + ".")] = style
        else:
            tree[pattern] = style
    return tree


def _layer_of(pattern: str) -> str:
    """The pattern up to its last `*` segment, or list of layers."""
    segments = pattern.split(".")
    last = max((i for i, s in enumerate(segments[:-1]) if s == "*" or re.fullmatch(r"\{[\d,]+\}|\d+", s)), default=-1)
    return ".".join(segments[: last + 1])


# -- parameter rules -------------------------------------------------------------------------------------------------
# Rules of parameters that are no linear's: by their module, or each by its name where those of one module differ.


def note_partial(styles: dict[str, str], model: nn.Module, partial: Set[str]) -> None:
    """Add the rules of the parameters of whose gradient each rank has a part: by their module, if all of its own are
    such.

    styles: so far, by the name of a module or parameter. partial: by name.
    """
    for name in sorted(partial):
        module = name.rpartition(".")[0]
        owner = model.get_submodule(module)
        own = {f"{module}.{key}".lstrip("."): value for key, value in owner.named_parameters(recurse=False)}
        if not own[name].requires_grad:
            continue
        trained = {key for key, parameter in own.items() if parameter.requires_grad}
        are_alike = bool(module) and trained <= partial and not own.keys() & styles.keys()
        styles.setdefault(module if are_alike else name, PARTIAL_GRADIENT)


def other_parameters(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    """The other parameters of modules of which some have rules of their own: the rule of all other modules does not
    claim them."""
    others: list[str] = []
    for name, facts in describe(model).modules.items():
        own = [f"{name}.{key}".lstrip(".") for key in facts.shapes]
        if name and name not in styles and any(parameter in styles for parameter in own):
            others += [parameter for parameter in own if parameter not in styles]
    return others


def leaves_something(model: nn.Module, styles: Mapping[str, str]) -> bool:
    """Whether some parameter has no rule yet."""
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return any(not {name, name.rpartition(".")[0]} & styles.keys() for name in parameters)


def names_of(model: nn.Module) -> list[str]:
    """The names of modules, and of parameters in them. A module of several names has the first alone."""
    modules = [name for name, _ in model.named_modules()]
    known = set(modules)
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [*modules, *(name for name in parameters if name.rpartition(".")[0] in known)]


# -- vocabulary rules ------------------------------------------------------------------------------------------------
# Rules of the vocabulary: the table of token embeddings, and the linear that returns logits.


def vocabulary_rules(
    analysis: FactorAnalysis, fields: Mapping[str, int], styles: Mapping[str, str], logits: str
) -> dict[str, str]:
    """Styles by module. fields: of the config. styles: so far. logits: what the head returns, `vocabulary` or
    `full`."""
    tables = {
        name
        for lookup in analysis.record.lookups
        if isinstance(analysis.modules.get(name := lookup.table.rpartition(".")[0]), nn.Embedding)
        and lookup.of_tokens
        and _is_only_looked_up(analysis, lookup.dim)
    }
    if not tables:
        return {}
    vocabulary = fields.get("vocab_size")
    sizes = {name: analysis.modules[name].num_embeddings for name in tables}
    largest = max(tables, key=lambda name: (sizes[name] == vocabulary, sizes[name], name))
    rows = analysis.modules[largest].num_embeddings
    sharded = {id(analysis.modules[name].weight) for name in tables if sizes[name] == rows}
    embeddings = {name: module for name, module in analysis.modules.items() if isinstance(module, nn.Embedding)}
    rules = {name: "embedding" for name, module in embeddings.items() if id(module.weight) in sharded}
    full = {id(module.weight) for name, module in embeddings.items() if name not in {*styles, *rules}}
    for name, linear in analysis.linears.items():
        is_head = linear.weight.ndim == 2 and linear.weight.shape[output_dim(linear)] == rows
        # a tie with a table that is not sharded
        if name not in styles and is_head and id(linear.weight) not in full:
            rules[name] = f"colwise(output={logits})"
    return rules


def _is_only_looked_up(analysis: FactorAnalysis, dim: Any) -> bool:
    return not any(set(leaves(mix.dim)) & set(leaves(dim)) for mix in analysis.record.mixes)
