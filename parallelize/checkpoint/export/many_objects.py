"""While a plan of an export is made, Python's garbage collector does not look for cycles.

A plan is a hundred small objects a tensor, none of which is in a cycle. For every 700 of them a collection would look at the youngest
ones, and after a hundred such collections one looks at all objects of the process, which takes longer than the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cycles() -> Iterator[None]:
    """Within the block, objects are freed as their last references go. No rank waits in it for another one."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
