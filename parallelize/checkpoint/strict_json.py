"""JSON from outside: no key twice, no endless depth, no numbers that are none. Torch-free."""

from __future__ import annotations

import json
import re
from typing import Any

from parallelize.errors import CheckpointError, Problem

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(text: bytes, where: str, *, finite: bool = True) -> Any:
    """Nesting ends where Python's recursion does. Halves of characters are refused: they cannot be told to other ranks.
    finite: NaN and Infinity, which are no JSON, are refused too.

    Raises: CheckpointError `bad-json`.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refused if finite else None)
        if finite and _HALF.search(text):
            write_json(found)
        return found
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        what = f"is not JSON as it should be: {str(error)[:160]}"
        raise CheckpointError(Problem("bad-json", what, where, fix="the file is damaged: get it anew")) from None


def write_json(value: Any) -> bytes:
    """Compact and in the order given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return found


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
