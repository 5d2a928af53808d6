"""Peak bytes, for tests. It is defined in the benchmarks, which use it too."""

from __future__ import annotations

from benchmarks.memory import peak_bytes

__all__ = ["peak_bytes"]
