"""While many small objects are made that stay, Python's garbage collector does not look for cycles.

Plans, loads, exports and searches make a hundred objects a tensor, none of which is in a cycle. For every 700 of them a collection would
look at the youngest ones, and after a hundred such collections one looks at all objects of the process: tenths of a second with torch
and transformers imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
