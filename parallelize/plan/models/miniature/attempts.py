"""The small versions of a config that are tried, the one that tells most first: a class of `transformers` may refuse
any."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallelize.plan.models.miniature.rules import Rules
from parallelize.plan.models.miniature.small_config import small_config

_LAYERS = 4  # of a config that changes in nothing else: in some, layers of a kind share their weights

log = logging.getLogger("parallelize")

_OWN_HEADS: dict[str, Any] = {"distinct": False, "head_width": 0}
_ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_width": 16},
    {"distinct": False, "head_width": 16},
    _OWN_HEADS,
)


def small_versions(config: Any, rules: Rules) -> Iterator[Any]:
    """Small versions of a config, for ranks and ratios as `rules` says. Of a family, those with the ratios of the
    config too: some classes take no other."""
    family = [] if rules.ratios_kept else [replace(rules, **changes) for changes in _ATTEMPTS if changes != _OWN_HEADS]
    model = [replace(rules, ratios_kept=True, **changes) for changes in _ATTEMPTS]
    for attempt in (*family, *model, replace(rules, only_layers=True, stages=max(_LAYERS, rules.stages))):
        try:
            small = small_config(config, attempt)
        except Exception as error:  # whatever the class raises for sizes that it does not take
            log.debug("%s refuses small sizes: %s", type(config).__name__, error)
            continue
        yield small
