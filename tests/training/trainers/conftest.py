"""A job on as many ranks as the mesh has."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest


@pytest.fixture
def ranks(two_processes, four_processes):
    pools = {2: two_processes, 4: four_processes}

    def run(axes, job, *args, **kwargs):
        return pools[prod(axes.values())].run(partial(job, **kwargs), *args, timeout_s=100)

    return run
