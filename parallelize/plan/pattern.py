"""Patterns of fully qualified names: `*` stands for one segment or a part of it, `{q,k}_proj` for alternatives.

`model.layers.*.self_attn.{q,k,v}_proj` has five segments and matches names with exactly five. Matching is linear in the
name's length: no regular expressions of the user's.

Floor 2: torch-free.
"""

from __future__ import annotations

import re
from functools import lru_cache

from parallelize.errors import PlanError, Problem

_VALID = re.compile(r"(?:[A-Za-z0-9_]|\*(?!\*)|\{[A-Za-z0-9_,]+\})+\Z")


def check_pattern(pattern: str, where: str) -> None:
    """Raises: PlanError `bad-pattern`."""
    for segment in pattern.split("."):
        if not _VALID.match(segment):
            raise PlanError(
                Problem(
                    "bad-pattern",
                    f"cannot read segment {segment!r} of {pattern!r}",
                    where,
                    fix="segments of letters, digits, _, `*` (one segment or a part of it) and {a,b}, joined by dots",
                )
            )


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    out: list[str] = []
    for piece in re.findall(r"\{[^}]*\}|\*|[^*{]+", pattern):
        if piece == "*":
            out.append(r"[^.]+" if not out or out[-1].endswith(r"\.") else r"[^.]*")
        elif piece[0] == "{":
            out.append("(?:" + "|".join(map(re.escape, piece[1:-1].split(","))) + ")")
        else:
            out.append(re.escape(piece))
    return re.compile("".join(out) + r"\Z")


def matches(pattern: str, name: str) -> bool:
    return _compiled(pattern).match(name) is not None


def alternatives(pattern: str) -> list[str]:
    """The pattern with its braces written out: each must match something."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return [pattern]
    start, end = found.span()
    return [
        whole for word in found.group(1).split(",") for whole in alternatives(pattern[:start] + word + pattern[end:])
    ]


def generic(name: str) -> str:
    """The name with numbers as `*`: how equal layers are grouped in tables and messages."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
