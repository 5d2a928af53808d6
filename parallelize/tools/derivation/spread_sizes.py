"""Local attributes in all layers alike: a forward of a small model reads them in some layers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from parallelize.plan.attribute_paths import dotted
from parallelize.plan.pattern import generic

Styles = Mapping[str, str]


def spread_local(
    local: dict[str, dict[str, str]],
    styles: Styles,
    counts: Mapping[str, int],
    modules: Mapping[str, nn.Module],
) -> None:
    """Add to `local` the attributes that some layers read, in all layers of the same styles, also where another stage
    has heads of its own: other inputs, and larger models, read them too.

    Args:
        local: by module, the size of each attribute that becomes local. styles: by the name of a module or parameter.
        counts: by name, what a size counts in this model. modules: of the model, by name.
    """
    first: dict[tuple[str, str, str], str] = {}  # the size tells stages apart, whose heads are of different fields
    for name, sizes in local.items():
        for attribute, size in sizes.items():
            first.setdefault((generic(name), attribute, size), name)
    for (pattern, attribute, size), donor in first.items():
        value = _value_of(modules[donor], attribute)
        for name in modules if type(value) is int else ():
            own = _size_in(name, size, donor, styles, counts) if generic(name) == pattern else ""
            factor = counts[own] / counts[size] if own != size and own else 1
            if own and _value_of(modules[name], attribute) == value * factor:
                local.setdefault(name, {}).setdefault(attribute, own)


def _value_of(module: nn.Module, attribute: str) -> Any:
    """None of a field of a config, which layers may share."""
    return None if attribute.startswith("config.") else dotted(module, attribute)


def _size_in(name: str, size: str, donor: str, styles: Styles, counts: Mapping[str, int]) -> str:
    """What a module has in the place of a size of another one, whose styles inside are the same but for the names of
    sizes; empty: they differ."""
    inside, own = _inside(styles, donor), _inside(styles, name)
    if inside.keys() != own.keys() or size not in counts:
        return size if inside == own else ""
    words = [[word for key in inside for word in re.findall(r"\w+", each[key])] for each in (inside, own)]
    pairs = set(zip(*words, strict=False))
    same = len(words[0]) == len(words[1]) and all(a == b or {a, b} <= counts.keys() for a, b in pairs)
    names = {b for a, b in pairs if a == size}
    return names.pop() if same and len(names) == 1 else size if inside == own else ""


def _inside(styles: Styles, name: str) -> dict[str, str]:
    """The styles of what is in a module, by the rest of its name."""
    return {key[len(name) :]: style for key, style in styles.items() if key.startswith(name + ".")}
