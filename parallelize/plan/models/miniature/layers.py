"""Few layers: the first of each kind, with what a config says of them."""

from __future__ import annotations

from typing import Any

from parallelize.plan.models.miniature.roles import ConfigPart, Role
from parallelize.plan.models.miniature.rules import Rules

_MOST = 3
_OF_STAGE = 2  # layers: in models with windows, every second one shifts them
_SHARED = "num_kv_shared_layers"
_FEATURES = "vision_feature_layer"


def choose_layers(part: ConfigPart, rules: Rules) -> None:
    """At least three layers, one of each kind, and one for each stage of a pipeline. Lists with a value for each layer
    keep those layers' values, and lists of layers' indexes name layers that there still are."""
    stages = {len(depths) for _, depths in part.lists(Role.DEPTHS)}
    depths = {name: value for name, value in part.numbers(Role.DEPTH) if value not in stages}
    counts = {value for value in depths.values() if value > _MOST}
    main = max(counts, default=0)
    chosen = _first_of_each_kind(_kinds(part, counts, main), main, max(_MOST, rules.stages))
    for name, value in depths.items():
        part[name] = min(value, len(chosen))
    for name, value in part.real.items():
        if isinstance(value, (list, tuple)) and len(value) in counts and name not in depths:
            part[name] = type(value)(value[index] for index in chosen if index < len(value))
    if shared := part.number(_SHARED):
        part[_SHARED] = sum(index >= main - shared for index in chosen)
    for name, value in part.numbers(Role.DENSE_LAYERS):
        part[name] = min(value, 1)
    for name, values in part.lists(Role.DEPTHS):
        part[name] = type(values)(min(value, _OF_STAGE) for value in values)
    if main:
        for name, values in part.lists(Role.LAYERS):
            kept = [chosen.index(index) for index in values if index in chosen]
            part[name] = type(values)(kept or ([] if name.endswith("ids") else [len(chosen) - 1]))
    _keep_features(part)


def _kinds(part: ConfigPart, counts: set[int], main: int) -> list[Any]:
    """For each layer what it is, where the config lists that, and whether it has keys and values of its own."""
    listed = [
        value
        for value in part.real.values()
        if isinstance(value, (list, tuple)) and len(value) in counts and all(isinstance(kind, str) for kind in value)
    ]
    if shared := part.number(_SHARED):  # the last ones have those of a layer before them
        listed.append([index >= main - shared for index in range(main)])
    return list(zip(*listed, strict=False)) if listed else [()] * main


def _first_of_each_kind(kinds: list[Any], count: int, least: int) -> list[int]:
    """The first layer of each kind, and others up to `least`."""
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    others = [index for index in range(max(count, _MOST)) if index not in chosen]
    return sorted([*chosen, *others[: max(0, least - len(chosen))]])


def _keep_features(part: ConfigPart) -> None:
    """Of the layers of a tower whose outputs are read, those that there are: others are the last one."""
    chosen, tower = part.real.get(_FEATURES), part["vision_config"]
    layers = getattr(tower, "num_hidden_layers", None)
    if type(layers) is not int or chosen is None:
        return
    layers = min(layers, _MOST)
    kept = [
        index if -layers - 1 <= index <= layers else layers for index in ([chosen] if type(chosen) is int else chosen)
    ]
    part[_FEATURES] = kept[0] if type(chosen) is int else kept
