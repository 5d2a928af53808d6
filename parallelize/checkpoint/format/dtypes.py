"""The dtypes of safetensors files, and their names in PyTorch. Does not import torch."""

from __future__ import annotations

SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Bytes per element."""

TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}

CODES = {name: code for code, name in TORCH.items()}
FLOATS = ("F64", "F32", "F16", "BF16")


def is_lossy(source: str, target: str) -> bool:
    """Whether the conversion from one dtype to the other can change a value."""
    return source != target and target not in _EXACT_TARGETS.get(source, ())


_EXACT_TARGETS = {
    "F32": ("F64",),
    "F16": ("F32", "F64"),
    "BF16": ("F32", "F64"),
    "F8_E4M3": ("BF16", "F16", "F32", "F64"),
    "F8_E5M2": ("BF16", "F16", "F32", "F64"),
    "I8": ("I16", "I32", "I64"),
    "I16": ("I32", "I64"),
    "I32": ("I64",),
    "U8": ("U16", "U32", "U64", "I16", "I32", "I64"),
}
"""Dtype -> the wider dtypes that represent all its values exactly."""
