"""Reading what `trees.py` writes: a strict decoder of JSON that may be damaged or hostile.

An object {"$": tag, ...} has exactly the fields of its tag in `_READERS`. Whatever else comes is a CheckpointError.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch

from parallelize.errors import CheckpointError, Problem

TensorSource = Callable[[str], torch.Tensor]
"""The key of a stored tensor -> the tensor; KeyError for one that is not there."""

TAG = "$"
MOST_DEPTH = 64  # containers inside containers, and dims of a tensor
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (dict, float, int, list, set)}
PATHS: dict[str, Any] = {"native": type(Path()), "pure_posix": PurePosixPath, "pure_windows": PureWindowsPath}
UNMADE = re.compile(r"q|u?int[1-7]$")  # quantised dtypes have scales; PyTorch cannot copy integers of less than a byte
NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(value: Any, tensors: TensorSource | None = None, where: str = "value") -> Any:
    """The value that `encode` was given. Never runs code, and takes memory in proportion to the JSON.

    Args:
        tensors: gives the tensors that `encode` handed to its sink.

    Raises: CheckpointError `bad-value` with the path of what `encode` cannot have written.
    """
    return _Decoder(tensors).any(value, where, 0)


class _Decoder:
    """One walk. Methods named `read_*` read an object by its tag; `depth` counts the containers around it."""

    def __init__(self, tensors: TensorSource | None):
        self.tensors = tensors

    def any(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else _bad(where, f"is {value!r}, which JSON does not have")
        if kind not in (list, dict):
            _bad(where, f"is a {kind.__name__}, not JSON")
        if depth > MOST_DEPTH:
            _bad(where, f"lies in more than {MOST_DEPTH} containers")
        if kind is list:
            return self.items(value, where, depth)
        if TAG in value:
            return self.tagged(value, where, depth)
        return {_key(key, where): self.any(held, f"{where}.{key[:40]}", depth + 1) for key, held in value.items()}

    def tagged(self, value: dict, where: str, depth: int) -> Any:
        tag = value[TAG]
        if type(tag) is not str or tag not in _READERS:
            _bad(
                where, f"has the tag {_short(tag)}, which is not known", "read it with a newer version of this package"
            )
        fields, read = _READERS[tag]
        if value.keys() != {TAG, *fields}:
            _bad(where, f"has the fields {_short(list(value))}, and a {tag} has {sorted(fields)}")
        return read(self, value, where, depth)

    def items(self, value: Any, where: str, depth: int) -> list[Any]:
        if type(value) is not list:
            _bad(where, f"is {_short(value)} where a list belongs")
        return [self.any(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]

    def pairs(self, value: dict, where: str, depth: int) -> dict:
        found = {}
        for place, pair in enumerate(self.items(value["items"], where, depth - 1)):
            if type(pair) is not list or len(pair) != 2:
                _bad(f"{where}[{place}]", "is not a key and a value")
            if _hashed(pair[0], where) in found:
                _bad(where, f"has the key {_short(pair[0])} twice")
            found[pair[0]] = pair[1]
        return found

    def members(self, value: dict, where: str, depth: int) -> frozenset:
        items = [_hashed(item, where) for item in self.items(value["items"], where, depth)]
        found = frozenset(items)
        return found if len(found) == len(items) else _bad(where, "has a member twice")

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
            _bad(where, f"is not the text of a path of one of the kinds {list(PATHS)}")
        return kind(text)

    def numpy(self, value: dict, where: str, depth: int) -> Any:
        found = self.any(value["value"], where, depth)
        if type(found) is not torch.Tensor or not NUMPY.fullmatch(_name(found.dtype)):
            _bad(where, "is not a tensor that NumPy has numbers for")
        if value[TAG] == "numpy_scalar" and found.ndim:
            _bad(where, f"has the shape {list(found.shape)}, and a scalar has none")
        try:
            array = found.numpy()
        except (RuntimeError, ImportError):
            _bad(where, "is of NumPy, which is not there", "pip install numpy")
        return array[()] if value[TAG] == "numpy_scalar" else array

    def stored(self, value: dict, where: str, depth: int) -> torch.Tensor:
        dtype, shape = _form(value, where)
        key = value["key"]
        if self.tensors is None or type(key) is not str:
            _bad(where, f"is stored under the key {_short(key)}, and no stored tensors were given")
        try:
            found = self.tensors(key)
        except KeyError:
            _bad(where, f"is stored under the key {_short(key)}, which is not there")
        if found.dtype != dtype or list(found.shape) != shape:
            what = f"is {_name(found.dtype)} {list(found.shape)} where it is stored"
            _bad(where, f"{what}, and {_name(dtype)} {_short(shape)} was written")
        return found


def _form(value: dict, where: str) -> tuple[torch.dtype, list[int]]:
    dtype, shape = value["dtype"], value["shape"]
    if type(dtype) is not str or dtype not in _DTYPES or UNMADE.match(dtype):
        _bad(where, f"has the dtype {_short(dtype)}, which no saved tensor has")
    if type(shape) is not list or len(shape) > MOST_DEPTH:
        _bad(where, f"has the shape {_short(shape)}")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        _bad(where, f"has the shape {_short(shape)}")
    return _DTYPES[dtype], shape


def _inline(self: _Decoder, value: dict, where: str, depth: int) -> torch.Tensor:
    """Bytes to a tensor; their number is compared before anything is made."""
    dtype, shape = _form(value, where)
    raw = _raw(value, where)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        _bad(where, f"has {len(raw)} bytes, and {_name(dtype)} {_short(shape)} has another number of them")
    if dtype == torch.bool and raw.strip(b"\0\1"):
        _bad(where, "has a bool that is neither 0 nor 1")
    if not raw:
        return _made(where, lambda: torch.empty(shape, dtype=dtype, device="cpu"))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone()
    return _made(where, lambda: flat.view(dtype).reshape(shape))


def _made(where: str, make: Callable[[], Any]) -> Any:
    """What PyTorch makes of a text or of sizes that were checked here, unless it knows better."""
    try:
        return make()
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        return _bad(where, f"cannot be made: {str(error)[:80]}")


def _raw(value: dict, where: str) -> bytes:
    text = value["base64"]
    try:
        return base64.b64decode(text if type(text) is str else "?", validate=True)
    except ValueError:
        return _bad(where, "has bytes that are not base64")


def _text(self: _Decoder, value: dict, where: str, depth: int) -> str:
    raw = _raw(value, where)
    return _made(where, lambda: raw.decode("utf-8", "surrogatepass"))


def _whole(self: _Decoder, value: dict, where: str, depth: int) -> int:
    text = value["hex"]
    if type(text) is not str or not re.fullmatch(r"-?[0-9a-f]+", text):
        _bad(where, "is not a number in base 16")
    return int(text, 16)


def _number(self: _Decoder, value: dict, where: str, depth: int) -> float:
    text = value["value"]
    return _FLOATS[text] if type(text) is str and text in _FLOATS else _bad(where, f"is not one of {list(_FLOATS)}")


def _dtype(self: _Decoder, value: dict, where: str, depth: int) -> torch.dtype:
    name = value["name"]
    return _DTYPES[name] if type(name) is str and name in _DTYPES else _bad(where, f"is no dtype: {_short(name)}")


def _device(self: _Decoder, value: dict, where: str, depth: int) -> torch.device:
    name = value["name"]
    return (
        _made(where, lambda: torch.device(name)) if type(name) is str else _bad(where, f"is no device: {_short(name)}")
    )


def _size(self: _Decoder, value: dict, where: str, depth: int) -> torch.Size:
    sizes = value["items"]
    if type(sizes) is not list or not all(type(size) is int and -(2**63) <= size < 2**63 for size in sizes):
        _bad(where, f"is no size: {_short(sizes)}")
    return _made(where, lambda: torch.Size(sizes))


_READERS: dict[str, tuple[set[str], Callable[[_Decoder, dict, str, int], Any]]] = {
    "int": ({"hex"}, _whole),
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
    return key if type(key) is str else _bad(where, f"has the key {_short(key)}, and keys of JSON are text")


def _hashed(value: Any, where: str) -> Any:
    """A key or a member. Tensors hash by identity, so none was written as one."""
    inside = list(value) if isinstance(value, tuple | frozenset) else []
    if isinstance(value, torch.Tensor) or any(isinstance(item, torch.Tensor) for item in inside):
        _bad(where, "has a tensor as a key")
    try:
        hash(value)
    except TypeError:
        _bad(where, f"has a {type(value).__name__} as a key")
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    """Never the whole of what may be long. A number may have more digits than Python prints."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, str):
        return repr(value[:40])
    is_short = value is None or (isinstance(value, int | float) and abs(value) < 1e30)
    return repr(value) if is_short else type(value).__name__


def _bad(
    where: str, what: str, fix: str = "take another checkpoint; this one was damaged or changed by hand"
) -> NoReturn:
    raise CheckpointError(Problem("bad-value", f"{where[:200]} {what}", fix=fix))
