"""What a training script calls: `parallelize_module` (`apply_plan.py`) and `parallelize_model` (`apply_axes.py`), data,
trainers of other libraries.

Both are public names of the package. They are found here too, where they once stood.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {"parallelize_module": "apply_plan", "parallelize_model": "apply_axes"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
