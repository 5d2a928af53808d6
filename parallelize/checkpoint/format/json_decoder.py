"""The strict decoder of the JSON that `json_encoder.py` writes. The input may be damaged or hostile.

An object {"$": tag, ...} must have exactly the fields of its tag in `_READERS`. Any other input is a CheckpointError.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch

from parallelize.base.errors import CheckpointError, Problem

TensorSource = Callable[[str], torch.Tensor]
"""Key of a stored tensor -> the tensor. Raises KeyError for an unknown key."""

TAG = "$"
MAX_DEPTH = 64  # nested containers, and dims of a tensor
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (dict, float, int, list, set)}
PATHS: dict[str, Any] = {"native": type(Path()), "pure_posix": PurePosixPath, "pure_windows": PureWindowsPath}
UNSUPPORTED_DTYPES = re.compile(r"q|u?int[1-7]$")  # quantized dtypes have scales; PyTorch cannot copy sub-byte integers
NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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


class _Decoder:
    """One traversal. `where` is the path of the current value in the tree; `depth` counts the containers around it."""

    def __init__(self, tensors: TensorSource | None):
        self.tensors = tensors

    def any(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else _bad(where, f"is {value!r}, which JSON does not have")
        if kind not in (list, dict):
            _bad(where, f"is a {kind.__name__}, which is not JSON")
        if depth > MAX_DEPTH:
            _bad(where, f"is nested in more than {MAX_DEPTH} containers")
        if kind is list:
            return self.items(value, where, depth)
        if TAG in value:
            return self.tagged(value, where, depth)
        return {_key(key, where): self.any(item, f"{where}.{key[:40]}", depth + 1) for key, item in value.items()}

    def tagged(self, value: dict, where: str, depth: int) -> Any:
        tag = value[TAG]
        if type(tag) is not str or tag not in _READERS:
            _bad(where, f"has the tag {_short(tag)}, which is unknown", "read it with a newer version of this package")
        fields, read = _READERS[tag]
        if value.keys() != {TAG, *fields}:
            _bad(where, f"has the fields {_short(list(value))}, and a {tag} has {sorted(fields)}")
        return read(self, value, where, depth)

    def items(self, value: Any, where: str, depth: int) -> list[Any]:
        if type(value) is not list:
            _bad(where, f"is {_short(value)}, and a list is expected")
        return [self.any(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]

    def pairs(self, value: dict, where: str, depth: int) -> dict:
        mapping = {}
        for index, pair in enumerate(self.items(value["items"], where, depth - 1)):
            if type(pair) is not list or len(pair) != 2:
                _bad(f"{where}[{index}]", "is not a pair of key and value")
            if _hashable(pair[0], where) in mapping:
                _bad(where, f"has the key {_short(pair[0])} twice")
            mapping[pair[0]] = pair[1]
        return mapping

    def members(self, value: dict, where: str, depth: int) -> frozenset:
        items = [_hashable(item, where) for item in self.items(value["items"], where, depth)]
        members = frozenset(items)
        return members if len(members) == len(items) else _bad(where, "has a member twice")

    def complex(self, value: dict, where: str, depth: int) -> complex:
        parts = self.items(value["items"], where, depth - 1)
        if [type(part) for part in parts] != [float, float]:
            _bad(where, "is not two floats")
        return complex(*parts)

    def default_dict(self, value: dict, where: str, depth: int) -> defaultdict:
        name = value["factory"]
        if name is not None and (type(name) is not str or name not in FACTORIES):
            _bad(where, f"has the factory {_short(name)}, not one of {list(FACTORIES)}")
        return defaultdict(None if name is None else FACTORIES[name], self.pairs(value, where, depth))

    def path(self, value: dict, where: str, depth: int) -> Any:
        text = self.any(value["value"], where, depth)
        kind = PATHS.get(value["kind"]) if type(value["kind"]) is str else None
        if type(text) is not str or kind is None:
            _bad(where, f"is not a path of one of the kinds {list(PATHS)}")
        return kind(text)

    def numpy(self, value: dict, where: str, depth: int) -> Any:
        tensor = self.any(value["value"], where, depth)
        if type(tensor) is not torch.Tensor or not NUMPY.fullmatch(_name(tensor.dtype)):
            _bad(where, "is not a tensor of a dtype that NumPy has")
        if value[TAG] == "numpy_scalar" and tensor.ndim:
            _bad(where, f"has the shape {list(tensor.shape)}, and a scalar has the shape []")
        try:
            array = tensor.numpy()
        except (RuntimeError, ImportError):
            _bad(where, "is a value of NumPy, which is not installed", "pip install numpy")
        return array[()] if value[TAG] == "numpy_scalar" else array

    def stored(self, value: dict, where: str, depth: int) -> torch.Tensor:
        dtype, shape = _dtype_and_shape(value, where)
        key = value["key"]
        if self.tensors is None or type(key) is not str:
            _bad(where, f"is stored under the key {_short(key)}, and no stored tensors were passed")
        try:
            tensor = self.tensors(key)
        except KeyError:
            _bad(where, f"is stored under the key {_short(key)}, which does not exist")
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            what = f"is stored as {_name(tensor.dtype)} {list(tensor.shape)}"
            _bad(where, f"{what}, and {_name(dtype)} {_short(shape)} was written")
        return tensor


def _dtype_and_shape(value: dict, where: str) -> tuple[torch.dtype, list[int]]:
    dtype, shape = value["dtype"], value["shape"]
    if type(dtype) is not str or dtype not in _DTYPES or UNSUPPORTED_DTYPES.match(dtype):
        _bad(where, f"has the dtype {_short(dtype)}, which cannot be saved")
    if type(shape) is not list or len(shape) > MAX_DEPTH:
        _bad(where, f"has the shape {_short(shape)}")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        _bad(where, f"has the shape {_short(shape)}")
    return _DTYPES[dtype], shape


def _inline(self: _Decoder, value: dict, where: str, depth: int) -> torch.Tensor:
    """Bytes to a tensor. The number of bytes is checked before memory is allocated."""
    dtype, shape = _dtype_and_shape(value, where)
    raw = _raw(value, where)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        _bad(where, f"has {len(raw)} bytes, and {_name(dtype)} {_short(shape)} needs another number")
    if dtype == torch.bool and raw.strip(b"\0\1"):
        _bad(where, "has a bool that is neither 0 nor 1")
    if not raw:
        return _constructed(where, lambda: torch.empty(shape, dtype=dtype, device="cpu"))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone()
    return _constructed(where, lambda: flat.view(dtype).reshape(shape))


def _constructed(where: str, construct: Callable[[], Any]) -> Any:
    """The result of `construct`. PyTorch may reject a text or sizes that passed the checks here."""
    try:
        return construct()
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        return _bad(where, f"cannot be constructed: {str(error)[:80]}")


def _raw(value: dict, where: str) -> bytes:
    text = value["base64"]
    try:
        return base64.b64decode(text if type(text) is str else "?", validate=True)
    except ValueError:
        return _bad(where, "has bytes that are not valid base64")


def _text(self: _Decoder, value: dict, where: str, depth: int) -> str:
    raw = _raw(value, where)
    return _constructed(where, lambda: raw.decode("utf-8", "surrogatepass"))


def _integer(self: _Decoder, value: dict, where: str, depth: int) -> int:
    text = value["hex"]
    if type(text) is not str or not re.fullmatch(r"-?[0-9a-f]+", text):
        _bad(where, "is not a number in base 16")
    return int(text, 16)


def _number(self: _Decoder, value: dict, where: str, depth: int) -> float:
    text = value["value"]
    return _FLOATS[text] if type(text) is str and text in _FLOATS else _bad(where, f"is not one of {list(_FLOATS)}")


def _dtype(self: _Decoder, value: dict, where: str, depth: int) -> torch.dtype:
    name = value["name"]
    return _DTYPES[name] if type(name) is str and name in _DTYPES else _bad(where, f"is not a dtype: {_short(name)}")


def _device(self: _Decoder, value: dict, where: str, depth: int) -> torch.device:
    name = value["name"]
    return (
        _constructed(where, lambda: torch.device(name))
        if type(name) is str
        else _bad(where, f"is not a device: {_short(name)}")
    )


def _size(self: _Decoder, value: dict, where: str, depth: int) -> torch.Size:
    sizes = value["items"]
    if type(sizes) is not list or not all(type(size) is int and -(2**63) <= size < 2**63 for size in sizes):
        _bad(where, f"is not a torch.Size: {_short(sizes)}")
    return _constructed(where, lambda: torch.Size(sizes))


_READERS: dict[str, tuple[set[str], Callable[[_Decoder, dict, str, int], Any]]] = {
    "int": ({"hex"}, _integer),
    "float": ({"value"}, _number),
    "complex": ({"items"}, _Decoder.complex),
    "str": ({"base64"}, _text),
    "bytes": ({"base64"}, lambda self, value, where, depth: _raw(value, where)),
    "tuple": ({"items"}, lambda self, value, where, depth: tuple(self.items(value["items"], where, depth))),
    "set": ({"items"}, lambda self, value, where, depth: set(self.members(value, where, depth))),
    "frozenset": ({"items"}, _Decoder.members),
    "dict": ({"items"}, _Decoder.pairs),
    "counter": ({"items"}, lambda self, value, where, depth: Counter(self.pairs(value, where, depth))),
    "ordered_dict": ({"items"}, lambda self, value, where, depth: OrderedDict(self.pairs(value, where, depth))),
    "defaultdict": ({"factory", "items"}, _Decoder.default_dict),
    "tensor": ({"dtype", "shape", "base64"}, _inline),
    "stored_tensor": ({"dtype", "shape", "key"}, _Decoder.stored),
    "ndarray": ({"value"}, _Decoder.numpy),
    "numpy_scalar": ({"value"}, _Decoder.numpy),
    "dtype": ({"name"}, _dtype),
    "device": ({"name"}, _device),
    "size": ({"items"}, _size),
    "path": ({"kind", "value"}, _Decoder.path),
}


def _key(key: Any, where: str) -> str:
    return key if type(key) is str else _bad(where, f"has the key {_short(key)}, and JSON keys are text")


def _hashable(value: Any, where: str) -> Any:
    """Check a key or a member of a set. Tensors hash by identity, so `encode` writes none as a key."""
    items = list(value) if isinstance(value, tuple | frozenset) else []
    if isinstance(value, torch.Tensor) or any(isinstance(item, torch.Tensor) for item in items):
        _bad(where, "has a tensor as a key")
    try:
        hash(value)
    except TypeError:
        _bad(where, f"has a {type(value).__name__} as a key")
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    """A short text for a value. Large numbers show their type: Python refuses to print very long integers."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, str):
        return repr(value[:40])
    is_short = value is None or (isinstance(value, int | float) and abs(value) < 1e30)
    return repr(value) if is_short else type(value).__name__


def _bad(where: str, what: str, fix: str = "load another checkpoint; this one is damaged or was edited") -> NoReturn:
    raise CheckpointError(Problem("bad-value", f"{where[:200]} {what}", fix=fix))
