"""JSON that is not trusted: duplicate keys, excessive nesting and non-finite numbers are refused. Does not import
torch."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from parallelize.base.errors import CheckpointError, Problem

_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(text: bytes, where: str, *, finite: bool = True) -> Any:
    """Parse JSON. Nesting is limited by Python's recursion limit.

    Args:
        text: UTF-8.
        where: the file, for errors.
        finite: refuse NaN, Infinity, and lone surrogates, which cannot be encoded to send them to other ranks.

    Raises: CheckpointError `bad-json`.
    """
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant if finite else None
        )
        if finite and _LONE_SURROGATE.search(text):
            write_json(value)
        return value
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        what = f"is not valid JSON: {str(error)[:160]}"
        raise CheckpointError(
            Problem("bad-json", what, where, fix="the file is damaged: copy or download it again")
        ) from None


def write_json(value: Any) -> bytes:
    """Compact JSON, with keys in their own order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {duplicate[:80]!r} occurs twice")
    return mapping


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
