"""Lists of hosts as SLURM writes them: `node[01-03,7],gpu5`. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parallelize.base.errors import LaunchError, Problem

_BRACKET = re.compile(r"([^\[\],]*)\[([^\]]*)\](.*)")
MOST = 100_000


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises: LaunchError `bad-host-list`."""
    hosts: list[str] = []
    for part in _parts(text):
        for host in _expand(part, text):
            hosts.append(host)
            if len(hosts) > MOST:
                raise _wrong(text, f"more than {MOST} hosts")
    if not hosts:
        raise _wrong(text, "no host")
    return hosts


def _parts(text: str) -> Iterator[str]:
    """Parts between the commas that are not in brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _wrong(text, "a bracket that does not belong")
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _wrong(text, "an open bracket")
    if text[start:]:
        yield text[start:]


def _expand(part: str, text: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(part)
    if match is None and part:
        yield part
        return
    if match is None:
        return
    before, ranges, after = match.groups()
    for interval in ranges.split(","):
        first, dash, last = interval.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first) > 9 or len(last) > 9:
            raise _wrong(text, f"{interval!r} is no range of numbers")
        if int(last or first) - int(first) > MOST:
            raise _wrong(text, f"more than {MOST} hosts")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{rest}"


def _wrong(text: str, what: str) -> LaunchError:
    return LaunchError(Problem("bad-host-list", f"{what} in the list of hosts {text[:80]!r}", fix="write node[01-04]"))
