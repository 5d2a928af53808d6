"""The objects {"$": tag, field: ...} by which JSON has values that are not its own: one table, for both directions.

`json_codec.py` traverses values and JSON by it.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import torch

from parallelize.base.errors import CheckpointError, Problem

TAG = "$"
MAX_DEPTH = 64  # nested containers, and dims of a tensor
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (dict, float, int, list, set)}
_PATHS: dict[str, Any] = {"native": type(Path()), "pure_posix": PurePosixPath, "pure_windows": PureWindowsPath}
_UNSUPPORTED = re.compile(r"q|u?int[1-7]$")  # quantized dtypes have scales; PyTorch cannot copy sub-byte integers
_NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
SAVED_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not _UNSUPPORTED.match(name)}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class TaggedForm:
    """How values are written as an object {"$": tag, field: ...}, and how it is read again.

    Attributes:
        fields: names beside the tag, in the order in which they are written. No other ones are read.
        write: (encoder, value, where) -> what the fields have.
        read: (decoder, where, depth, what each field has, of any type) -> the value.
        types: classes whose values are written so, without their subclasses; empty where more than the class decides.
        is_plain: whether JSON has a value as it is, without a tag.
    """

    tag: str
    fields: tuple[str, ...]
    write: Callable[[Any, Any, str], tuple[Any, ...]]
    read: Callable[..., Any]
    types: tuple[type, ...] = ()
    is_plain: Callable[[Any], bool] = lambda value: False


# -- numbers, text and bytes -------------------------------------------------------------------------------------------


def is_text(value: str) -> bool:
    """Lone surrogates (file names of unknown encoding) are not UTF-8, and JSON would join two of them."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _raw(where: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text if type(text) is str else "?", validate=True)
    except ValueError:
        return bad(where, "has bytes that are not valid base64")


def _integer(decoder: Any, where: str, depth: int, text: Any) -> int:
    if type(text) is not str or not re.fullmatch(r"-?[0-9a-f]+", text):
        bad(where, "is not a number in base 16")
    return int(text, 16)


def _complex(decoder: Any, where: str, depth: int, items: Any) -> complex:
    parts = decoder.items(items, where, depth - 1)
    if [type(part) for part in parts] != [float, float]:
        bad(where, "is not two floats")
    return complex(*parts)


def _text(decoder: Any, where: str, depth: int, encoded: Any) -> str:
    raw = _raw(where, encoded)
    return _constructed(where, lambda: raw.decode("utf-8", "surrogatepass"))


def _path_parts(name: str, encoder: Any, value: PurePath, where: str) -> tuple[str, Any]:
    return name, encoder.any(str(value), where)


def _path(decoder: Any, where: str, depth: int, name: Any, value: Any) -> Any:
    text, what = decoder.any(value, where, depth), f"is not a path of one of the kinds {list(_PATHS)}"
    kind = _named(where, name, _PATHS, what)
    return kind(text) if type(text) is str else bad(where, what)


def _named(where: str, name: Any, known: Mapping[str, Any], what: str) -> Any:
    """What a name stands for. what: of any other value, which may be no text."""
    return known[name] if type(name) is str and name in known else bad(where, what)


# -- containers --------------------------------------------------------------------------------------------------------


def _items(encoder: Any, value: Any, where: str) -> tuple[Any]:
    return (encoder.items(value, where),)


def _members(encoder: Any, value: Any, where: str) -> tuple[Any]:
    return (encoder.members(value, where),)


def _pairs(encoder: Any, value: Any, where: str) -> tuple[Any]:
    return (encoder.pairs(value, where),)


def _factory_and_pairs(encoder: Any, mapping: defaultdict, where: str) -> tuple[Any, Any]:
    factory = mapping.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        name = getattr(factory, "__qualname__", type(factory).__name__)
        unsavable(where, f"is a defaultdict of {name}", f"use {', '.join(_FACTORIES)} or a plain dict")
    return None if factory is None else factory.__name__, encoder.pairs(mapping, where)


def _default_dict(decoder: Any, where: str, depth: int, name: Any, items: Any) -> defaultdict:
    what = f"has the factory {short(name)}, not one of {list(_FACTORIES)}"
    factory = None if name is None else _named(where, name, _FACTORIES, what)
    return defaultdict(factory, decoder.pairs(items, where, depth))


# -- tensors and arrays ------------------------------------------------------------------------------------------------


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_plain(value: torch.Tensor, where: str) -> None:
    """Refuse tensors that are not plain dense values: their class, layout or scales would be lost.

    Raises: CheckpointError `unsavable-value`.
    """
    if type(value) is not torch.Tensor:
        name = type(value).__name__
        fixes = {"DTensor": "pass value.to_local() or value.full_tensor()", "Parameter": "pass value.detach()"}
        unsavable(where, f"is a {name}", fixes.get(name, "pass a plain torch.Tensor"))
    name = _dtype_name(value.dtype)
    is_strided = value.layout == torch.strided and not value.is_nested
    if not is_strided or _UNSUPPORTED.match(name) or value.device.type == "meta":
        what = f"is a tensor of dtype {name}, layout {value.layout} on {value.device}"
        unsavable(where, what, "pass a dense tensor of an ordinary dtype")
    if value.ndim > MAX_DEPTH:
        unsavable(where, f"has {value.ndim} dims", f"at most {MAX_DEPTH} can be saved")


def _inlined(encoder: Any, value: torch.Tensor, where: str) -> tuple[str, list[int], str]:
    return _dtype_name(value.dtype), list(value.shape), _base64(_bytes_of(value))


def _bytes_of(value: torch.Tensor) -> bytes:
    """The bytes of a tensor, without NumPy. In chunks, because a list of numbers takes eight times the memory of the
    bytes."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8)
    return b"".join(bytes(chunk.tolist()) for chunk in flat.split(1 << 20))


def _checked_dtype(where: str, name: Any, shape: Any) -> torch.dtype:
    """The dtype of a tensor, whose shape is checked too."""
    dtype = _named(where, name, SAVED_DTYPES, f"has the dtype {short(name)}, which cannot be saved")
    is_short = type(shape) is list and len(shape) <= MAX_DEPTH
    if not is_short or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        bad(where, f"has the shape {short(shape)}")
    return dtype


def _inline(decoder: Any, where: str, depth: int, name: Any, shape: Any, encoded: Any) -> torch.Tensor:
    """Bytes to a tensor. The number of bytes is checked before memory is allocated."""
    dtype, raw = _checked_dtype(where, name, shape), _raw(where, encoded)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        bad(where, f"has {len(raw)} bytes, and {name} {short(shape)} needs another number")
    if dtype == torch.bool and raw.strip(b"\0\1"):
        bad(where, "has a bool that is neither 0 nor 1")
    if not raw:
        return _constructed(where, lambda: torch.empty(shape, dtype=dtype, device="cpu"))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone()
    return _constructed(where, lambda: flat.view(dtype).reshape(shape))


def _put(encoder: Any, value: torch.Tensor, where: str) -> tuple[str, list[int], str]:
    return _dtype_name(value.dtype), list(value.shape), encoder.tensors(where, value.detach())


def _stored(decoder: Any, where: str, depth: int, name: Any, shape: Any, key: Any) -> torch.Tensor:
    dtype = _checked_dtype(where, name, shape)
    if decoder.tensors is None or type(key) is not str:
        bad(where, f"is stored under the key {short(key)}, and no stored tensors were passed")
    try:
        tensor = decoder.tensors(key)
    except KeyError:
        bad(where, f"is stored under the key {short(key)}, which does not exist")
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        what = f"is stored as {_dtype_name(tensor.dtype)} {list(tensor.shape)}"
        bad(where, f"{what}, and {name} {short(shape)} was written")
    return tensor


def _as_tensor(encoder: Any, value: Any, where: str) -> tuple[Any]:
    if not _NUMPY.fullmatch(str(value.dtype)):  # the text begins with "<" or ">" if the byte order is not native
        unsavable(where, f"is of NumPy's dtype {value.dtype.str!r}", "save numbers of a native dtype that torch has")
    array = sys.modules["numpy"].array(value, order="C")
    return (encoder.tensor(torch.from_numpy(array), where),)


def _array(decoder: Any, where: str, depth: int, value: Any) -> Any:
    tensor = decoder.any(value, where, depth)
    if type(tensor) is not torch.Tensor or not _NUMPY.fullmatch(_dtype_name(tensor.dtype)):
        bad(where, "is not a tensor of a dtype that NumPy has")
    try:
        return tensor.numpy()
    except (RuntimeError, ImportError):
        return bad(where, "is a value of NumPy, which is not installed", "pip install numpy")


def _scalar(decoder: Any, where: str, depth: int, value: Any) -> Any:
    array = _array(decoder, where, depth, value)
    what = f"has the shape {list(array.shape)}, and a scalar has the shape []"
    return bad(where, what) if array.ndim else array[()]


# -- other values of PyTorch -------------------------------------------------------------------------------------------


def _device(decoder: Any, where: str, depth: int, name: Any) -> torch.device:
    if type(name) is not str:
        bad(where, f"is not a device: {short(name)}")
    return _constructed(where, lambda: torch.device(name))


def _size(decoder: Any, where: str, depth: int, sizes: Any) -> torch.Size:
    if type(sizes) is not list or not all(type(size) is int and -(2**63) <= size < 2**63 for size in sizes):
        bad(where, f"is not a torch.Size: {short(sizes)}")
    return _constructed(where, lambda: torch.Size(sizes))


def _constructed(where: str, construct: Callable[[], Any]) -> Any:
    """The result of `construct`. PyTorch may reject a text or sizes that passed the checks here."""
    try:
        return construct()
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        return bad(where, f"cannot be constructed: {str(error)[:80]}")


# -- the table ---------------------------------------------------------------------------------------------------------


_ITEMS, _VALUE, _BASE64 = ("items",), ("value",), ("base64",)
_TABLE = (
    # base 16: Python refuses to parse more than 4300 decimal digits
    TaggedForm("int", ("hex",), lambda e, v, w: (format(v, "x"),), _integer, (int,), lambda v: v.bit_length() < 64),
    TaggedForm(
        "float",
        _VALUE,
        lambda e, v, w: (repr(v),),
        lambda d, w, n, v: _named(w, v, _FLOATS, f"is not one of {list(_FLOATS)}"),
        (float,),
        math.isfinite,
    ),
    TaggedForm("complex", _ITEMS, lambda e, v, w: ([e.any(v.real, w), e.any(v.imag, w)],), _complex, (complex,)),
    TaggedForm("str", _BASE64, lambda e, v, w: (_base64(v.encode("utf-8", "surrogatepass")),), _text, (str,), is_text),
    TaggedForm("bytes", _BASE64, lambda e, v, w: (_base64(v),), lambda d, w, n, v: _raw(w, v), (bytes,)),
    TaggedForm("tuple", _ITEMS, _items, lambda d, w, n, v: tuple(d.items(v, w, n)), (tuple,)),
    TaggedForm("set", _ITEMS, _members, lambda d, w, n, v: set(d.members(v, w, n)), (set,)),
    TaggedForm("frozenset", _ITEMS, _members, lambda d, w, n, v: d.members(v, w, n), (frozenset,)),
    TaggedForm("dict", _ITEMS, _pairs, lambda d, w, n, v: d.pairs(v, w, n), (dict,)),
    TaggedForm("counter", _ITEMS, _pairs, lambda d, w, n, v: Counter(d.pairs(v, w, n)), (Counter,)),
    TaggedForm("ordered_dict", _ITEMS, _pairs, lambda d, w, n, v: OrderedDict(d.pairs(v, w, n)), (OrderedDict,)),
    TaggedForm("defaultdict", ("factory", "items"), _factory_and_pairs, _default_dict, (defaultdict,)),
    TaggedForm("tensor", ("dtype", "shape", "base64"), _inlined, _inline),
    TaggedForm("stored_tensor", ("dtype", "shape", "key"), _put, _stored),
    TaggedForm("ndarray", _VALUE, _as_tensor, _array),
    TaggedForm("numpy_scalar", _VALUE, _as_tensor, _scalar),
    TaggedForm(
        "dtype",
        ("name",),
        lambda e, v, w: (_dtype_name(v),),
        lambda d, w, n, v: _named(w, v, _DTYPES, f"is not a dtype: {short(v)}"),
        (torch.dtype,),
    ),
    TaggedForm("device", ("name",), lambda e, v, w: (str(v),), _device, (torch.device,)),
    TaggedForm("size", _ITEMS, lambda e, v, w: (list(v),), _size, (torch.Size,)),
    *(
        TaggedForm("path", ("kind", "value"), partial(_path_parts, name), _path, (kind,))
        for name, kind in _PATHS.items()
    ),
)
BY_TAG = {form.tag: form for form in _TABLE}
BY_TYPE = {kind: form for form in _TABLE for kind in form.types}


# -- errors ------------------------------------------------------------------------------------------------------------


def unsavable(where: str, what: str, fix: str) -> NoReturn:
    raise CheckpointError(Problem("unsavable-value", f"{where} {what}", fix=fix))


def bad(where: str, what: str, fix: str = "load another checkpoint; this one is damaged or was edited") -> NoReturn:
    raise CheckpointError(Problem("bad-value", f"{where[:200]} {what}", fix=fix))


def short(value: Any) -> str:
    """A short text for a value, in a message. Large numbers show their type: Python refuses to print very long
    integers."""
    if isinstance(value, list):
        return f"[{', '.join(map(short, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, str):
        return repr(value[:40])
    is_short = value is None or (isinstance(value, int | float) and abs(value) < 1e30)
    return repr(value) if is_short else type(value).__name__
