"""What the file of a run says, as one flat dict, for tests that otherwise use public names only."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from parallelize.launch.config.run_config_file import read_run_config

_ABOUT_THE_FILE = ("source", "text", "places")


def settings_of(path: Path) -> dict[str, Any]:
    """Dotted key to value, of every key of the file, given or not."""
    return dict(_flat("", read_run_config(path)))


def _flat(prefix: str, section: Any) -> Any:
    for each in fields(section):
        value, name = getattr(section, each.name), f"{prefix}{each.name}"
        if hasattr(value, "explicit"):  # the options
            yield from ((f"{name}.{key}", option) for key, option in value.explicit().items())
        elif hasattr(value, "axes"):  # a mesh
            yield name, dict(value.axes)
        elif is_dataclass(value):
            yield from _flat(f"{name}.", value)
        elif name not in _ABOUT_THE_FILE:
            yield name, list(value) if isinstance(value, tuple) else value
