"""What lower rooms call of higher ones, by a name: the package's map of public names says where each stands.

A plan `"auto"` is derived by running forwards and `verify`, a plan is traced by the tools that explain it, and the
forwards of layers with adapters stand in the room of adapters: all are above what asks for them. Nothing is imported
before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_HOMES: dict[str, str] = {}


def provide(**homes: str) -> None:
    """Say which module provides what. homes: name -> dotted name of a module."""
    _HOMES.update(homes)


def provider(name: str) -> ModuleType:
    """The module that provides `name`, imported now. Raises: KeyError for what nothing provides."""
    return import_module(_HOMES[name])
