"""Changes to a module tree: undone when one fails halfway, and without a search for garbage while many objects are
made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
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


# -- many objects ----------------------------------------------------------------------------------------------------
# While many small objects are made that stay, Python's garbage collector does not look for cycles. Plans, loads,
# exports and searches make a hundred objects a tensor, none of which is in a cycle. For every 700 of them a
# collection would look at the youngest ones, and after a hundred such collections one looks at all objects of the
# process: tenths of a second with torch and transformers imported.


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within the block, objects are freed as their last references go."""
    if not gc.isenabled():  # also within another block, which ends later or, of another thread, at any time
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
