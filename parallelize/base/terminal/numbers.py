"""Figures as text: three digits and a unit. Bytes are decimal (1 GB = 10^9 bytes), as in data sheets."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = "GB, MB, kB are 10^9, 10^6, 10^3 bytes"


def amount(value: float) -> str:
    """Bytes: amount(65_103_972_992) is '65.1 GB'."""
    return _scaled(value, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15)))


def duration(seconds: float) -> str:
    """Seconds: duration(0.5501) is '550 ms'."""
    return _scaled(seconds, (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))) if seconds else "0 s"


def count(value: float) -> str:
    """Numbers of parameters, with the letters of papers: count(70_553_706_496) is '70.6B'."""
    return _scaled(value, (("", 1.0), ("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12))).replace(" ", "")


def operations(value: float) -> str:
    return _scaled(value, (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15)))


def _scaled(value: float, scales: Sequence[tuple[str, float]]) -> str:
    """In the smallest unit that needs at most three digits before the point."""
    unit, scale = next((pair for pair in scales if abs(value) < 999.5 * pair[1]), scales[-1])
    number = value / scale
    if abs(number) >= 999.5 or (scale == 1.0 and unit in ("B", "")):
        return f"{number:,.0f} {unit}"
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def times(before: float, after: float) -> str:
    """The ratio of two figures of a comparison: 'x1.5', or 'same', 'new', 'gone'."""
    if before == after:
        return "same"
    if not before:
        return "new"
    if not after:
        return "gone"
    ratio = after / before
    return "same" if abs(ratio - 1) < 5e-4 else f"x{ratio:.3g}"


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
