"""Pools of processes for rows whose ranks are processes, where no test has brought one: started once, ended at exit."""

from __future__ import annotations

import atexit
import multiprocessing
from functools import cache

from tests.support.processes import Pool


@cache
def pool_of(world_size: int) -> Pool:
    """The pool of so many ranks of this process."""
    multiprocessing.current_process()._config["daemon"] = False  # a worker of a pass may start processes
    pool = Pool(world_size)
    atexit.register(pool.close)
    return pool
