"""One thread a rank, quiet logs, and the same random numbers for every test."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _one_thread_one_seed(request):
    if "torch_free" in request.keywords:
        yield
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def two_processes():
    from tests.support.processes import Pool

    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_processes():
    from tests.support.processes import Pool

    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_processes():
    from tests.support.processes import Pool

    pool = Pool(8)
    yield pool
    pool.close()
