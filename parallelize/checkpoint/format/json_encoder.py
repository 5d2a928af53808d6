"""Plain Python values as JSON and back, exactly and without pickle: the part of a checkpoint that is not tensors.

    None, bool, str, list, integers of 64 bits, finite floats    plain JSON
    a dict whose keys are all text                               a JSON object, in the order of the dict
    everything else                                              an object {"$": tag, ...}, see `json_decoder.py`

A dict that has a key "$" is written with the tag "dict", so that user data is never read as a tag. Equal values give
equal
JSON: dicts keep their order (write the JSON without `sort_keys`), and sets are sorted by the JSON of their members.

Tensors are saved as dense, detached values and are loaded on the CPU. Attributes set on a dict are not saved.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any, NoReturn

import torch

from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.json_decoder import (
    FACTORIES,
    MAX_DEPTH,
    NUMPY,
    PATHS,
    TAG,
    UNSUPPORTED_DTYPES,
    TensorSource,
    decode,
)

__all__ = ["TensorSink", "TensorSource", "decode", "encode"]

TensorSink = Callable[[str, torch.Tensor], str]
"""(where, tensor) -> the key under which the tensor is stored. The tensor is detached; it may share memory with the
user's."""

INLINE_BYTES = 4096  # larger tensors are passed to the sink


def encode(value: Any, where: str = "value", tensors: TensorSink | None = None) -> Any:
    """Convert a value into one that `json.dumps(..., allow_nan=False)` accepts.

    Args:
        value: the value to encode.
        where: name of the value in errors and in calls of `tensors`, such as `user`.
        tensors: stores tensors of more than INLINE_BYTES. Without it, their bytes are written into the JSON.

    Raises: CheckpointError `unsavable-value`, with the path of the value.
    """
    return _Encoder(tensors).any(value, where)


class _Encoder:
    """One traversal. `open` has the ids of the containers around the current value; `in_key` is positive inside a
    key."""

    def __init__(self, tensors: TensorSink | None):
        self.tensors = tensors
        self.open: list[int] = []
        self.in_key = 0

    def any(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _WRITERS:
            return _WRITERS[kind](value)
        if kind in _CONTAINERS:
            return self.container(value, where)
        if isinstance(value, torch.Tensor):
            if self.in_key:  # the loaded tensor would be another key
                _unsavable(where, "is a tensor, which hashes by identity", "use a name as key")
            return self.tensor(value, where)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self.numpy(value, where, numpy)
        return _refuse(value, where)

    def container(self, value: Any, where: str) -> Any:
        if id(value) in self.open:
            _unsavable(where, "is inside itself", "break the cycle")
        if len(self.open) >= MAX_DEPTH:
            _unsavable(where, f"is nested in more than {MAX_DEPTH} containers", "save it in a flatter form")
        self.open.append(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, where)
        finally:
            self.open.pop()

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.any(item, f"{where}[{index}]") for index, item in enumerate(values)]

    def members(self, values: Iterable[Any], where: str) -> list[Any]:
        encoded = [self.key(item, f"{where}{{{_short(item)}}}") for item in values]
        return sorted(encoded, key=lambda item: json.dumps(item, allow_nan=False))

    def pairs(self, mapping: dict, where: str) -> list[list[Any]]:
        return [
            [self.key(key, f"the key {_short(key)} of {where}"), self.any(value, _path_of(where, key))]
            for key, value in mapping.items()
        ]

    def key(self, value: Any, where: str) -> Any:
        """A key of a dict or a member of a set."""
        self.in_key += 1
        try:
            return self.any(value, where)
        finally:
            self.in_key -= 1

    def plain_dict(self, mapping: dict, where: str) -> Any:
        if all(type(key) is str and key != TAG and _is_text(key) for key in mapping):
            return {key: self.any(value, _path_of(where, key)) for key, value in mapping.items()}
        return {TAG: "dict", "items": self.pairs(mapping, where)}

    def default_dict(self, mapping: defaultdict, where: str) -> Any:
        factory = mapping.default_factory
        if factory is not None and factory not in FACTORIES.values():
            fix = f"use {', '.join(FACTORIES)} or a plain dict"
            _unsavable(where, f"is a defaultdict of {_short(factory)}", fix)
        name = None if factory is None else factory.__name__
        return {TAG: "defaultdict", "factory": name, "items": self.pairs(mapping, where)}

    def tensor(self, value: torch.Tensor, where: str) -> Any:
        _check_plain(value, where)
        name = str(value.dtype).removeprefix("torch.")
        fields = {TAG: "tensor", "dtype": name, "shape": list(value.shape)}
        if self.tensors is not None and value.numel() * value.element_size() > INLINE_BYTES:
            return {**fields, TAG: "stored_tensor", "key": self.tensors(where, value.detach())}
        return {**fields, "base64": _base64(_bytes_of(value))}

    def numpy(self, value: Any, where: str, numpy: Any) -> Any:
        if not NUMPY.fullmatch(str(value.dtype)):  # the text begins with "<" or ">" if the byte order is not native
            _unsavable(
                where, f"is of NumPy's dtype {value.dtype.str!r}", "save numbers of a native dtype that torch has"
            )
        tag = "ndarray" if type(value) is numpy.ndarray else "numpy_scalar"
        return {TAG: tag, "value": self.tensor(torch.from_numpy(numpy.array(value, order="C")), where)}


def _check_plain(value: torch.Tensor, where: str) -> None:
    """Refuse tensors that are not plain dense values: their class, layout or scales would be lost."""
    if type(value) is not torch.Tensor:
        name = type(value).__name__
        fixes = {"DTensor": "pass value.to_local() or value.full_tensor()", "Parameter": "pass value.detach()"}
        _unsavable(where, f"is a {name}", fixes.get(name, "pass a plain torch.Tensor"))
    name = str(value.dtype).removeprefix("torch.")
    if (
        value.layout != torch.strided
        or value.is_nested
        or UNSUPPORTED_DTYPES.match(name)
        or value.device.type == "meta"
    ):
        what = f"is a tensor of dtype {name}, layout {value.layout} on {value.device}"
        _unsavable(where, what, "pass a dense tensor of an ordinary dtype")
    if value.ndim > MAX_DEPTH:
        _unsavable(where, f"has {value.ndim} dims", f"at most {MAX_DEPTH} can be saved")


def _bytes_of(value: torch.Tensor) -> bytes:
    """The bytes of a tensor, without NumPy. In chunks, because a list of numbers takes eight times the memory of the
    bytes."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8)
    return b"".join(bytes(chunk.tolist()) for chunk in flat.split(1 << 20))


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _number(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}


def _integer(value: int) -> Any:
    """Large integers in base 16: Python refuses to parse more than 4300 decimal digits."""
    return value if value.bit_length() < 64 else {TAG: "int", "hex": format(value, "x")}


def _text(value: str) -> Any:
    """Lone surrogates (file names of unknown encoding) are not UTF-8, and JSON would join two of them."""
    return value if _is_text(value) else {TAG: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _path(kind: str) -> Callable[[PurePath], Any]:
    return lambda value: {TAG: "path", "kind": kind, "value": _text(str(value))}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    complex: lambda value: {TAG: "complex", "items": [_number(value.real), _number(value.imag)]},
    str: _text,
    bytes: lambda value: {TAG: "bytes", "base64": _base64(value)},
    torch.dtype: lambda value: {TAG: "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value: {TAG: "device", "name": str(value)},
    torch.Size: lambda value: {TAG: "size", "items": list(value)},
    **{kind: _path(name) for name, kind in PATHS.items()},
}
_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    tuple: lambda self, value, where: {TAG: "tuple", "items": self.items(value, where)},
    set: lambda self, value, where: {TAG: "set", "items": self.members(value, where)},
    frozenset: lambda self, value, where: {TAG: "frozenset", "items": self.members(value, where)},
    dict: _Encoder.plain_dict,
    Counter: lambda self, value, where: {TAG: "counter", "items": self.pairs(value, where)},
    OrderedDict: lambda self, value, where: {TAG: "ordered_dict", "items": self.pairs(value, where)},
    defaultdict: _Encoder.default_dict,
}


def _refuse(value: Any, where: str) -> NoReturn:
    kind = type(value)
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        name = "lambda" if value.__name__ == "<lambda>" else "function"
        _unsavable(where, f"is a {name}", "save the values it uses, and recreate it after loading")
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    fix = "pass its state_dict()" if hasattr(kind, "state_dict") else "save numbers, text, tensors, lists and dicts"
    if kind is torch.Generator:
        fix = "pass its get_state()"
    _unsavable(where, f"is a {module}{kind.__qualname__}", fix)


def _unsavable(where: str, what: str, fix: str) -> NoReturn:
    raise CheckpointError(Problem("unsavable-value", f"{where} {what}", fix=fix))


def _path_of(where: str, key: Any) -> str:
    return f"{where}.{key}" if type(key) is str and key.isidentifier() else f"{where}[{_short(key)}]"


def _short(value: Any) -> str:
    """A short text for a value: long text is truncated, containers and long numbers show their type."""
    if isinstance(value, str):
        return repr(value if len(value) <= 32 else value[:29] + "...")
    if isinstance(value, int | float) and abs(value) < 1e18:
        return repr(value)
    return getattr(value, "__qualname__", type(value).__name__)
