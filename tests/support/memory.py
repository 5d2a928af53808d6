"""Bytes that live at once, for tests. It stands with the benchmarks, which need it too."""

from __future__ import annotations

from benchmarks.memory import peak_bytes

__all__ = ["peak_bytes"]
