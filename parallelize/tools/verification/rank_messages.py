"""What ranks tell each other of a comparison, as JSON: a store listens on the network, and what it holds is never
unpickled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from parallelize.base.errors import HandshakeError, ParallelizeError, Problem
from parallelize.base.files.strict_json import read_json, write_json
from parallelize.checkpoint.format.json_codec import decode, encode
from parallelize.tools.verification.compare import Errors
from parallelize.tools.verification.module_trace import ErrorRecord, ModuleCall, ModuleTrace


def errors_message(errors: list[Errors]) -> bytes:
    """The errors of a rank, one for each batch."""
    return _message([_plain(each) for each in errors])


def errors_from(message: bytes, rank: int) -> list[Errors]:
    """Raises: HandshakeError `bad-message`."""
    return _read(message, rank, lambda values: [Errors(**each) for each in values])


def traces_message(traces: list[ModuleTrace]) -> bytes:
    """The traces of a rank, one for each batch, with their tensors."""
    return _message([_plain(trace) for trace in map(ModuleTrace.on_cpu, traces)])


def traces_from(message: bytes, rank: int) -> list[ModuleTrace]:
    """Raises: HandshakeError `bad-message`."""
    return _read(message, rank, lambda values: [_trace(each) for each in values])


def _trace(value: dict[str, Any]) -> ModuleTrace:
    calls = [ModuleCall(**call) for call in value["calls"]]
    error = ErrorRecord(**value["error"]) if value["error"] is not None else None
    return ModuleTrace(calls, value["gradients"], error)


def _plain(value: Any) -> Any:
    """A record as a dict of its fields, with the records inside it."""
    if isinstance(value, (Errors, ModuleTrace, ModuleCall, ErrorRecord)):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _message(value: Any) -> bytes:
    return write_json(encode(value, "message"))


def _read(message: bytes, rank: int, build: Any) -> Any:
    try:
        return build(decode(read_json(message, f"the message of rank {rank}"), None, "message"))
    except (ParallelizeError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"rank {rank} sent no result: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        fix = "run it again, where nothing else connects to the ranks"
        raise HandshakeError(Problem("bad-message", what, fix=fix)) from error
