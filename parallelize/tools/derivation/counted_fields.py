"""The fields of a config that count features and heads, by which a plan names its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from parallelize.plan.attribute_paths import dotted
from parallelize.plan.model_facts import describe

_NO_COUNT = re.compile(
    r"(num|in|image)_channels$|num_labels$|_ids?$|_index$|layers$|^depth|patch_size|kernel|stride|buckets|version"
    r"|chunk_size|d_conv$|expand$|_rank$"
)


def counted_fields(model: nn.Module) -> dict[str, int]:
    """The counts of a model's config, by the names by which a plan reads them: its fields, and the fields of its
    parts."""
    fields = counts(describe(model).config)
    config = getattr(model, "config", None)
    for name in getattr(config, "sub_configs", None) or {}:
        fields |= {f"config.{name}.{key}": value for key, value in counts(getattr(config, name, None)).items()}
    return fields


def counts(config: Any) -> dict[str, int]:
    """Whole numbers of a config, other than those that count or name something else than features and heads."""
    if config is None:
        return {}
    numbers = {
        name: value for name, value in vars(config).items() if type(value) is int and value > 1 and name.isidentifier()
    }
    numbers |= {f"{name}.{index}": value for name, index, value in _heads_of_stages(config) if value > 1}
    return {
        name: value for name, value in numbers.items() if not _NO_COUNT.search(name) and dotted(config, name) == value
    }


def _heads_of_stages(config: Any) -> Iterator[tuple[str, int, int]]:
    """(field, index, value) of lists that give the number of heads of each stage."""
    for name, values in vars(config).items():
        if "head" in name and isinstance(values, (list, tuple)):
            yield from ((name, index, value) for index, value in enumerate(values) if type(value) is int)
