"""Patterns of fully qualified names: `*` matches one segment or a part of it, `{q,k}_proj` lists alternatives.

`model.layers.*.self_attn.{q,k,v}_proj` has five segments and matches names with exactly five. Users cannot write
regular expressions, so matching is linear in the length of the name. `encoder.**` matches `encoder` and everything
inside of it: the pattern of a rule for what no other rule claims.

Torch-free.
"""

from __future__ import annotations

import re
from functools import lru_cache

from parallelize.base.errors import PlanError, Problem

_VALID = re.compile(r"(?:[\w-]|\*(?!\*)|\{[\w,-]+\})+\Z")
_UNREADABLE = re.compile(r"[^\w.-]+")


def readable(name: str) -> str:
    """A pattern of one name: what no pattern can have, as a key of a ModuleDict may, is `*`."""
    return _UNREADABLE.sub("*", name)


def is_default(pattern: str) -> bool:
    """Whether a pattern is that of a default rule, for all of a module that no other rule claims."""
    return pattern.rpartition(".")[2] == "**"


def check_pattern(pattern: str, where: str, defaults: bool = False, root: bool = False) -> None:
    """defaults: whether the last segment may be `**`. root: whether it may be empty, which names the model itself.

    Raises: PlanError `bad-pattern`.
    """
    if root and not pattern:
        return
    segments = pattern.split(".")
    for segment in segments[:-1] if defaults and is_default(pattern) else segments:
        if not _VALID.match(segment):
            raise PlanError(
                Problem(
                    "bad-pattern",
                    f"cannot read segment {segment!r} of {pattern!r}",
                    where,
                    fix=(
                        "segments of letters, digits, _, -, `*` (one segment or a part of it) and {a,b}, joined by dots"
                    ),
                )
            )


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if is_default(pattern):
        above = pattern.rpartition(".")[0]
        return re.compile(_compiled(above).pattern.removesuffix(r"\Z") + r"(?:\..*)?\Z") if above else re.compile(".*")
    out: list[str] = []
    for token in re.findall(r"\{[^}]*\}|\*|[^*{]+", pattern):
        if token == "*":
            out.append(r"[^.]+" if not out or out[-1].endswith(r"\.") else r"[^.]*")
        elif token[0] == "{":
            out.append("(?:" + "|".join(map(re.escape, token[1:-1].split(","))) + ")")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out) + r"\Z")


def matches(pattern: str, name: str) -> bool:
    """Whether the full name matches the pattern."""
    return _compiled(pattern).match(name) is not None


def alternatives(pattern: str) -> list[str]:
    """The pattern with its braces expanded. Each alternative must match something."""
    braces = re.search(r"\{([^}]*)\}", pattern)
    if not braces:
        return [pattern]
    start, end = braces.span()
    return [
        expanded
        for word in braces.group(1).split(",")
        for expanded in alternatives(pattern[:start] + word + pattern[end:])
    ]


def generic(name: str) -> str:
    """The name with `*` for numbers, which groups equal layers in tables and messages; as it is where a parameter's
    owners have no other names, as in `nn.Sequential`."""
    parts = name.split(".")
    if all(part.isdigit() for part in parts[:-1]):
        return name
    return ".".join("*" if part.isdigit() else part for part in parts)
