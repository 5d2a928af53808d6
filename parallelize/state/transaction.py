"""Restores a module tree when a change to it fails halfway."""

from __future__ import annotations

from typing import Any

from torch import nn

_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Transaction:
    """Saves the dictionaries of every module (references, no data), and restores them on an exception."""

    def __init__(self, module: nn.Module):
        self._saved = [(m, type(m), dict(m.__dict__), self._tables(m)) for m in module.modules()]

    @staticmethod
    def _tables(module: nn.Module) -> dict[str, Any]:
        return {key: module.__dict__[key].copy() for key in _TABLES if key in module.__dict__}

    def __enter__(self) -> None:
        return None

    def __exit__(self, exception_type: type | None, *_: Any) -> None:
        if exception_type is not None:
            for module, cls, attributes, tables in self._saved:
                module.__class__ = cls
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for key, table in tables.items():
                    attributes[key].clear()
                    attributes[key].update(table)
        self._saved = []
