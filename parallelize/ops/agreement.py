"""Ranks compare what they are about to do before they send data: shapes, dtype, and way of sending.

Mismatched messages hang, kill a healthy rank, or give wrong numbers without an error (gloo, other dtype of equal size).
So a line of text of fixed length goes ahead. On a network that is driven by the host it goes ahead of every op (about
0.1 ms on loopback); on one that is driven by a device, where the host would have to wait for it, a line that this rank
has not used before goes through the store, and no data is sent until all ranks have posted the same. There, ranks that
fall out of step between lines that they all know are not noticed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize import _torch_private as private
from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.ops.exchange import Exchange

_LENGTH = 224
_STREAM = 7
_BY_STORE = ("nccl", "xccl")
_STORE_TIMEOUT_S = 60.0
_seen: dict[tuple[str, str], int] = {}
_settled: dict[tuple[str, str], str] = {}  # what the first rank of a group said with a line


class Meeting:
    """A line on its way to the other ranks; `check` waits for theirs. An empty line is no meeting."""

    def __init__(self, group: Group, device: torch.device, line: str):
        self.group, self.line, self.theirs = group, line, None
        backend = group.backend(device)
        self.by_store = backend in _BY_STORE
        if not line or backend == "fake" or group.size == 1:
            self.line = ""
        elif not self.by_store:
            self.link, self.theirs = _posted(group, line)

    def check(self) -> None:
        """Raises: ShapeError `ranks-disagree` naming each rank's line, on every rank."""
        if self.theirs is not None:
            _check(self.group, _received(self.group, self.link, self.theirs, self.line))
        elif self.line:
            _check(self.group, _through_store(self.group, self.line))
        self.theirs, self.line = None, ""


def agree(group: Group, device: torch.device, line: str) -> None:
    """Meet the other ranks on `line`.

    Raises: ShapeError `ranks-disagree` naming each rank's line, on every rank.
    """
    Meeting(group, device, line).check()


def agree_on_first(group: Group, device: torch.device, line: str, word: str) -> str:
    """Meet the other ranks on `line`, and take the first rank's word, where ranks may have come to different ones.

    Raises: ShapeError `ranks-disagree`.
    """
    by_store = group.backend(device) in _BY_STORE
    if by_store and (group.key, line) in _settled:
        return _settled[group.key, line]
    said = [text.partition(_MARK) for text in _lines(group, device, f"{line}{_MARK}{word}")]
    _check(group, [text for text, _, _ in said])
    if by_store:
        _settled[group.key, line] = said[0][2]
    return said[0][2] or word


_MARK = " | "


def _check(group: Group, lines: list[str]) -> None:
    if len(set(lines)) > 1:
        said = [(f"rank {group.ranks[place]}", text) for place, text in enumerate(lines)]
        raise ShapeError(
            Problem(
                "ranks-disagree",
                "the ranks of a group have come to one op with different arguments",
                rows=tuple(said[:16]),
                fix="give every rank the same batch shape, dtype and overlap; pass `full=` where shards are uneven",
            )
        )


def tell(group: Group, device: torch.device, problem: Problem) -> None:
    """Let the other ranks, which are waiting at an op, know that this one cannot come. Nothing is raised here."""
    _lines(group, device, f"error {problem.slug}: {problem.what}")


def _lines(group: Group, device: torch.device, line: str) -> list[str]:
    backend = group.backend(device)
    if backend == "fake" or group.size == 1:
        return [line]
    return _through_store(group, line) if backend in _BY_STORE else _through_messages(group, line)


def _through_messages(group: Group, line: str) -> list[str]:
    return _received(group, *_posted(group, line), line)


def _posted(group: Group, line: str) -> tuple[Exchange, dict[int, torch.Tensor]]:
    """The line on its way, and where those of the others will be."""
    mine = torch.frombuffer(bytearray(line.encode()[:_LENGTH].ljust(_LENGTH)), dtype=torch.uint8)
    theirs = {rank: torch.empty_like(mine) for rank in range(group.size) if rank != group.rank}
    link = Exchange(group)
    kept, group.traffic = group.traffic, None  # not part of what an op sends
    try:
        link.post(dict.fromkeys(theirs, mine), theirs, _STREAM)
    finally:
        group.traffic = kept
    return link, theirs


def _received(group: Group, link: Exchange, theirs: dict[int, torch.Tensor], line: str) -> list[str]:
    link.__exit__(None, None, None)
    own = line.encode()[:_LENGTH].decode(errors="replace").rstrip()
    said = {rank: bytes(raw.tolist()).decode(errors="replace").rstrip() for rank, raw in theirs.items()}
    return [own if rank == group.rank else said[rank] for rank in range(group.size)]


def _through_store(group: Group, line: str) -> list[str]:
    store: Any = private.default_store()
    if store is None or (group.key, line) in _seen:
        return [line]
    number = _seen[group.key, line] = sum(key == group.key for key, _ in _seen)
    base = f"parallelize/agreement/{group.pg.group_name}/{number}"
    store.set(f"{base}/{group.rank}", line)
    keys = [f"{base}/{rank}" for rank in range(group.size)]
    with suppress(RuntimeError, dist.DistError):  # whoever is absent is named below
        store.wait(keys, timedelta(seconds=_STORE_TIMEOUT_S))
    return [store.get(key).decode() if store.check([key]) else "has not come here" for key in keys]
