"""The values of a config that no model has: too large to build, below what a model needs, or of the wrong kind.

A config.json comes from elsewhere. `transformers` builds whatever it says: a list entry for each of 1e12 layers, a
table of 1e18 rows. The limits here lie far above every published model, so that what is refused is a mistake or an
attack. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import Problem, short_list

MAX_NESTING = 64
"""The configs of `transformers` have 6 levels; Python's functions that copy nested values end at about 300."""


@dataclass(frozen=True)
class Limit:
    """What the fields whose names match may be at most, and why."""

    names: re.Pattern[str]
    most: int
    why: str


LIMITS = (
    Limit(
        re.compile(r"(layers?|blocks?|depths?|repeats|stacks?)$"),
        1024,
        "the deepest published models have 1,000 layers, and each layer is built in Python",
    ),
    Limit(re.compile(r"experts?$"), 16_384, "the largest published mixtures have 2,048 experts"),
    Limit(re.compile(r"labels$"), 1 << 20, "a config lists a name for each label"),
    Limit(
        re.compile(r"hidden_size|intermediate_size|heads?$|_dims?$|n_embd|n_inner|d_model|d_ff|d_kv|ffn_dim"),
        1 << 20,
        "the widest published models have 53,248 channels",
    ),
    Limit(re.compile(r""), (1 << 31) - 1, "no published model has a size of this order"),
)
"""The first limit that matches a field's name applies."""

_NO_SIZE = re.compile(r"theta|base|val|clip|param|scal|seed|total")
"""Of the names without a limit of their own, those of numbers that are not sizes: rotary bases, sentinels, total
counts."""

POSITIVE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields that are at least 1 where they are set, in every config of `transformers`."""

_IMPLEMENTATIONS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")


def config_problems(
    values: Mapping[str, Any], where: str = "", aliases: Mapping[str, str] | None = None
) -> list[Problem]:
    """What is wrong with the values of a config, before anything is built from them.

    Args:
        values: the fields, as in a config.json or as overrides.
        where: the file, for messages.
        aliases: other names of fields to the config's own: the `attribute_map` of its class.

    Returns: problems `bad-config`, empty where the values can be tried.
    """
    too_deep = _nesting(values, MAX_NESTING + 1) > MAX_NESTING
    texts = [f"it is nested more than {MAX_NESTING} levels deep"] if too_deep else list(_wrong(values, aliases or {}))
    if not texts:
        return []
    fix = "correct the config, or download it again"
    more = texts[1:9]
    rows = (("also", short_list(more, 4)),) if more else ()
    return [Problem("bad-config", texts[0], where, rows, fix)]


def _nesting(value: Any, most: int) -> int:
    """Levels of lists and objects, counted up to `most`."""
    level, count = [value], 0
    while level and count < most:
        level = [
            inner
            for outer in level
            if isinstance(outer, (Mapping, list, tuple))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        count += 1
    return count


def _wrong(values: Mapping[str, Any], aliases: Mapping[str, str]) -> Iterator[str]:
    names = values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield f"architectures is {_shown(names)}, and not a list of names of classes"
    for path, value in _floats(values):
        if math.isnan(value):
            yield f"{path} is NaN, with which every output is"
    positive = {*POSITIVE, *(aliases.get(name, name) for name in POSITIVE)}
    for path, name, value in _numbers(values):
        limit = next(limit for limit in LIMITS if limit.names.search(name))
        if abs(value) > limit.most and not (limit is LIMITS[-1] and _NO_SIZE.search(name)):
            yield f"{path} is {_shown(value)}, and at most {limit.most:,} is accepted: {limit.why}"
        elif name in positive and value < 1 and "[" not in path:
            yield f"{path} is {_shown(value)}, and must be at least 1"
    for name in _IMPLEMENTATIONS:
        if isinstance(text := values.get(name), str) and "/" in text:
            yield f"{name} is {_shown(text)}, a repository of code, which is not run"


def _numbers(value: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, int]]:
    """(path, name of the field, integer) of every integer; those of a list have the name of the list."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key), str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{index}]", name)
    elif type(value) is int:
        yield path, name, value


def _floats(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(path, value) of every floating-point number."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _floats(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _floats(inner, f"{path}[{index}]")
    elif type(value) is float:
        yield path, value


def _shown(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}" if abs(value) < 10**24 else f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
