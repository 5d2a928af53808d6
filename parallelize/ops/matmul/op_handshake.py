"""Ranks compare what they are about to do before they send data: shapes, dtype and algorithm.

Mismatched messages hang, kill a healthy rank, or give wrong numbers without an error (gloo, with another dtype of equal
size). So a line of text of fixed length is sent first. With a backend that the host drives, it is sent before every op
(about 0.1 ms on loopback). With a backend that a device drives, the host would have to wait for the device. There a
line is sent through the store, the first time that this rank uses it with this group, and no data is sent until all
ranks have posted the same line. If ranks run ops whose lines all of them have used before in different orders, that is
not detected. A rank whose line is new to it, while the others have used theirs before, raises after a minute; the
others wait for its data until the timeout of the group.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange
from parallelize.comm.turns import takes_turns

_LENGTH = 224
_STREAM = 7
_BY_STORE = ("nccl", "xccl")
_STORE_TIMEOUT_S = 60.0
_SEPARATOR = " | "


def _by_store(backend: str) -> bool:
    """A computation that takes turns with another must not wait for a line behind the other's messages."""
    return backend in _BY_STORE or takes_turns()


class OpAgreement:
    """Sends a line to the other ranks; `check` waits for their lines and compares. Nothing is sent for an empty
    line."""

    def __init__(self, group: Group, device: torch.device, line: str):
        self.group, self.line = group, line
        self.messages: _LineMessages | None = None
        backend = group.backend(device)
        if not line or backend == "fake" or group.size == 1:
            self.line = ""
        elif not _by_store(backend):
            self.messages = _LineMessages(group, line)

    def check(self) -> None:
        """Wait for the lines of the other ranks; only the first call does anything.

        Raises: ShapeError `ranks-disagree` with each rank's line, on every rank.
        """
        if self.messages is not None:
            _compare(self.group, self.messages.receive())
        elif self.line:
            _compare(self.group, _exchange_by_store(self.group, self.line))
        self.messages, self.line = None, ""


def agree(group: Group, device: torch.device, line: str) -> None:
    """Compare `line` with the other ranks.

    Raises: ShapeError `ranks-disagree` with each rank's line, on every rank.
    """
    OpAgreement(group, device, line).check()


def agree_on_first(group: Group, device: torch.device, line: str, choice: str) -> str:
    """Compare `line` with the other ranks, and return the first rank's `choice`, which may differ over ranks.

    Raises: ShapeError `ranks-disagree`.
    """
    by_store = _by_store(group.backend(device))
    if by_store and line in group.state.first_choices:
        return group.state.first_choices[line]
    answers = [text.partition(_SEPARATOR) for text in _exchange(group, device, f"{line}{_SEPARATOR}{choice}")]
    _compare(group, [text for text, _, _ in answers])
    first = answers[0][2]
    if by_store:
        group.state.first_choices[line] = first
    return first or choice


def report_failure(group: Group, device: torch.device, problem: Problem) -> None:
    """Tell the other ranks, which are waiting at an op, that this rank cannot run it. Nothing is raised here."""
    _exchange(group, device, f"error {problem.slug}: {problem.what}")
    group.state.forget_lines()  # as the others do, whose lines differ from this one


def _compare(group: Group, lines: list[str]) -> None:
    if len(set(lines)) > 1:
        group.state.forget_lines()  # every rank raises, so that all begin anew
        rows = [(f"rank {group.ranks[rank]}", line) for rank, line in enumerate(lines)]
        raise ShapeError(
            Problem(
                "ranks-disagree",
                "the ranks of a group called one op with different arguments",
                rows=tuple(rows[:16]),
                fix="give every rank the same batch shape, dtype and overlap; pass `full=` if shards are uneven",
            )
        )


def _exchange(group: Group, device: torch.device, line: str) -> list[str]:
    """The lines of all ranks, by rank."""
    backend = group.backend(device)
    if backend == "fake" or group.size == 1:
        return [line]
    return _exchange_by_store(group, line) if _by_store(backend) else _LineMessages(group, line).receive()


class _LineMessages:
    """Lines that are sent between ranks as messages of the group."""

    def __init__(self, group: Group, line: str):
        self.group, self.line = group, line
        sent = torch.frombuffer(bytearray(line.encode()[:_LENGTH].ljust(_LENGTH)), dtype=torch.uint8)
        self.received = {rank: torch.empty_like(sent) for rank in range(group.size) if rank != group.rank}
        self.exchange = Exchange(group)
        # a recording contains only the op's own messages
        self.exchange.post(dict.fromkeys(self.received, sent), self.received, _STREAM, record=False)

    def receive(self) -> list[str]:
        """Wait for the lines of all ranks; by rank."""
        self.exchange.finish_all()
        lines = {rank: _text(bytes(raw.tolist())) for rank, raw in self.received.items()}
        lines[self.group.rank] = _text(self.line.encode()[:_LENGTH])
        return [lines[rank] for rank in range(self.group.size)]


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").rstrip()


def _exchange_by_store(group: Group, line: str) -> list[str]:
    """The lines of all ranks, by rank; only this rank's line if it was compared before."""
    store: Any = private_groups.default_store()
    state = group.state
    if store is None or line in state.posted:
        return [line]
    if not state.store_prefix:
        # a store may outlive a group, and a later group may have the same name: its keys must be new ones
        name = f"parallelize/op_handshake/{group.pg.group_name}"
        state.store_prefix = f"{name}/{store.add(f'{name}/uses/{group.rank}', 1)}"
    prefix = f"{state.store_prefix}/{len(state.posted)}"
    state.posted.add(line)
    store.set(f"{prefix}/{group.rank}", line)
    keys = [f"{prefix}/{rank}" for rank in range(group.size)]
    with suppress(RuntimeError, dist.DistError):  # ranks that are absent are named below
        store.wait(keys, timedelta(seconds=_STORE_TIMEOUT_S))
    return [store.get(key).decode() if store.check([key]) else "has not called this op" for key in keys]
