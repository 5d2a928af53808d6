"""Plain Python values as JSON and back, exactly and without pickle: the part of a checkpoint that is not tensors.

    None, bool, str, list, integers of 64 bits, finite floats    plain JSON
    a dict whose keys are all text                               a JSON object, in the order of the dict
    everything else                                              {"$": tag, field: ...}, see `json_forms.py`

A dict that has a key "$" is written with the tag "dict", so that user data is never read as a tag. Equal values give
equal JSON: dicts keep their order (write the JSON without `sort_keys`), and sets are sorted by the JSON of their
members.

Tensors are saved as dense, detached values and are loaded on the CPU. Attributes set on a dict are not saved.

What is read may be damaged or hostile. Any JSON that `encode` cannot have written is a CheckpointError.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from parallelize.checkpoint.format.json_forms import (
    BY_TAG,
    BY_TYPE,
    MAX_DEPTH,
    TAG,
    TaggedForm,
    bad,
    check_plain,
    is_text,
    short,
    unsavable,
)

TensorSink = Callable[[str, torch.Tensor], str]
"""(where, tensor) -> the key under which the tensor is stored. The tensor is detached; it may share memory with the
user's."""
TensorSource = Callable[[str], torch.Tensor]
"""Key of a stored tensor -> the tensor. Raises KeyError for an unknown key."""

INLINE_BYTES = 4096  # larger tensors are passed to the sink
_CONTAINERS = (list, tuple, set, frozenset, dict, Counter, OrderedDict, defaultdict)


def encode(value: Any, where: str = "value", tensors: TensorSink | None = None) -> Any:
    """Convert a value into one that `json.dumps(..., allow_nan=False)` accepts.

    Args:
        value: the value to encode.
        where: name of the value in errors and in calls of `tensors`, such as `user`.
        tensors: stores tensors of more than INLINE_BYTES. Without it, their bytes are written into the JSON.

    Raises: CheckpointError `unsavable-value`, with the path of the value.
    """
    return _Encoder(tensors).any(value, where)


def decode(value: Any, tensors: TensorSource | None = None, where: str = "value") -> Any:
    """Decode a value that `encode` has written. Never runs code; memory is proportional to the size of the JSON.

    Args:
        value: parsed JSON.
        tensors: returns the tensors that `encode` passed to its sink.
        where: name of the value in errors.

    Raises: CheckpointError `bad-value`, with the path of a value that `encode` cannot have written.
    """
    return _Decoder(tensors).any(value, where, 0)


def stored_keys(value: Any) -> Iterator[str]:
    """Keys of the stored tensors to which an encoded value refers."""
    if isinstance(value, dict) and value.get(TAG) == "stored_tensor":
        yield str(value.get("key"))
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_keys(item)


# -- the two traversals ------------------------------------------------------------------------------------------------


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
        if kind in _CONTAINERS:
            return self.container(value, where)
        if kind in BY_TYPE:
            form = BY_TYPE[kind]
            return value if form.is_plain(value) else self.tagged(form, value, where)
        if isinstance(value, torch.Tensor):
            if self.in_key:  # the loaded tensor would be another key
                unsavable(where, "is a tensor, which hashes by identity", "use a name as key")
            return self.tensor(value, where)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self.tagged(BY_TAG["ndarray" if kind is numpy.ndarray else "numpy_scalar"], value, where)
        return _refuse(value, where)

    def tensor(self, value: torch.Tensor, where: str) -> dict[str, Any]:
        check_plain(value, where)
        is_large = value.numel() * value.element_size() > INLINE_BYTES
        return self.tagged(BY_TAG["stored_tensor" if self.tensors and is_large else "tensor"], value, where)

    def tagged(self, form: TaggedForm, value: Any, where: str) -> dict[str, Any]:
        return {TAG: form.tag, **dict(zip(form.fields, form.write(self, value, where), strict=True))}

    def container(self, value: Any, where: str) -> Any:
        if id(value) in self.open:
            unsavable(where, "is inside itself", "break the cycle")
        if len(self.open) >= MAX_DEPTH:
            unsavable(where, f"is nested in more than {MAX_DEPTH} containers", "save it in a flatter form")
        self.open.append(id(value))
        try:
            if type(value) is list:
                return self.items(value, where)
            if type(value) is dict and all(type(key) is str and key != TAG and is_text(key) for key in value):
                return {key: self.any(item, _path_of(where, key)) for key, item in value.items()}
            return self.tagged(BY_TYPE[type(value)], value, where)
        finally:
            self.open.pop()

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.any(item, f"{where}[{index}]") for index, item in enumerate(values)]

    def members(self, values: Iterable[Any], where: str) -> list[Any]:
        encoded = [self.key(item, f"{where}{{{_in_path(item)}}}") for item in values]
        return sorted(encoded, key=lambda item: json.dumps(item, allow_nan=False))

    def pairs(self, mapping: dict, where: str) -> list[list[Any]]:
        return [
            [self.key(key, f"the key {_in_path(key)} of {where}"), self.any(value, _path_of(where, key))]
            for key, value in mapping.items()
        ]

    def key(self, value: Any, where: str) -> Any:
        """A key of a dict or a member of a set."""
        self.in_key += 1
        try:
            return self.any(value, where)
        finally:
            self.in_key -= 1


class _Decoder:
    """One traversal. `where` is the path of the current value in the tree; `depth` counts the containers around it."""

    def __init__(self, tensors: TensorSource | None):
        self.tensors = tensors

    def any(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else bad(where, f"is {value!r}, which JSON does not have")
        if kind not in (list, dict):
            bad(where, f"is a {kind.__name__}, which is not JSON")
        if depth > MAX_DEPTH:
            bad(where, f"is nested in more than {MAX_DEPTH} containers")
        if kind is list:
            return self.items(value, where, depth)
        if TAG in value:
            return self.tagged(value, where, depth)
        return {_key(key, where): self.any(item, f"{where}.{key[:40]}", depth + 1) for key, item in value.items()}

    def tagged(self, value: dict, where: str, depth: int) -> Any:
        tag = value[TAG]
        if type(tag) is not str or tag not in BY_TAG:
            bad(where, f"has the tag {short(tag)}, which is unknown", "read it with a newer version of this package")
        form = BY_TAG[tag]
        if value.keys() != {TAG, *form.fields}:
            bad(where, f"has the fields {short(list(value))}, and a {tag} has {sorted(form.fields)}")
        return form.read(self, where, depth, *(value[name] for name in form.fields))

    def items(self, value: Any, where: str, depth: int) -> list[Any]:
        if type(value) is not list:
            bad(where, f"is {short(value)}, and a list is expected")
        return [self.any(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]

    def pairs(self, items: Any, where: str, depth: int) -> dict:
        mapping = {}
        for index, pair in enumerate(self.items(items, where, depth - 1)):
            if type(pair) is not list or len(pair) != 2:
                bad(f"{where}[{index}]", "is not a pair of key and value")
            if _hashable(pair[0], where) in mapping:
                bad(where, f"has the key {short(pair[0])} twice")
            mapping[pair[0]] = pair[1]
        return mapping

    def members(self, value: Any, where: str, depth: int) -> frozenset:
        items = [_hashable(item, where) for item in self.items(value, where, depth)]
        members = frozenset(items)
        return members if len(members) == len(items) else bad(where, "has a member twice")


def _key(key: Any, where: str) -> str:
    return key if type(key) is str else bad(where, f"has the key {short(key)}, and JSON keys are text")


def _hashable(value: Any, where: str) -> Any:
    """Check a key or a member of a set. Tensors hash by identity, so `encode` writes none as a key."""
    items = list(value) if isinstance(value, tuple | frozenset) else []
    if isinstance(value, torch.Tensor) or any(isinstance(item, torch.Tensor) for item in items):
        bad(where, "has a tensor as a key")
    try:
        hash(value)
    except TypeError:
        bad(where, f"has a {type(value).__name__} as a key")
    return value


def _path_of(where: str, key: Any) -> str:
    return f"{where}.{key}" if type(key) is str and key.isidentifier() else f"{where}[{_in_path(key)}]"


def _in_path(key: Any) -> str:
    """A key in a path. Stored tensors are named by their paths, so this is a part of the format."""
    if isinstance(key, str):
        return repr(key if len(key) <= 32 else key[:29] + "...")
    if isinstance(key, int | float) and abs(key) < 1e18:
        return repr(key)
    return getattr(key, "__qualname__", type(key).__name__)


def _refuse(value: Any, where: str) -> NoReturn:
    kind = type(value)
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        name = "lambda" if value.__name__ == "<lambda>" else "function"
        unsavable(where, f"is a {name}", "save the values it uses, and recreate it after loading")
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    fix = "pass its state_dict()" if hasattr(kind, "state_dict") else "save numbers, text, tensors, lists and dicts"
    if kind is torch.Generator:
        fix = "pass its get_state()"
    unsavable(where, f"is a {module}{kind.__qualname__}", fix)
