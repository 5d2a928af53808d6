"""One thread a rank, quiet logs, the same random numbers for every test, and no process that a test leaves behind."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PARALLELIZE_TRACE", "off")  # tests apply plans thousands of times; those of the trace turn it on

import gc
import sys
import zlib
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

POOLS = ("two_processes", "four_processes", "eight_processes")
# of the variants that `every` would leave in `make test`, one of so many, which keeps it within six minutes on two
# cores
_SPARSER = 4


_SLICES = 8  # of the sweep; `.ci/run` runs one of them


def pytest_addoption(parser):
    parser.addoption(
        "--slice", type=int, metavar="N", help=f"run slice N modulo {_SLICES} of the chosen tests, drawn by their names"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(config, items):
    """Tests of many ranks run in one worker of xdist, one after another; variants go to the sweeps.

    Ranks wait for each other, so jobs that share two cores slow each other down by far more than a factor of two.
    """
    if os.environ.get("PARALLELIZE_TEST_DEVICE", "cpu") != "cpu":
        _leave_out_tests_of_cpus(config, items)
    seen: dict[str, int] = {}
    swept: dict[str, list[pytest.Item]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        if any(name in item.fixturenames for name in POOLS):
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.xdist_group("ranks"))
        variants = item.get_closest_marker("variants")
        if variants is not None:
            number = seen[function] = seen.get(function, -1) + 1
            if number % (_SPARSER * variants.kwargs["every"]):
                item.add_marker(pytest.mark.sweep)
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("full") is None:
            swept.setdefault(function, []).append(item)
    for variants in swept.values():
        _leave_to_the_full_sweep(variants)
    if (number := config.getoption("slice")) is not None:
        _leave_to_other_slices(config, items, number)


def pytest_collection_finish(session):
    """What was imported and collected lives to the end: the garbage collector need not walk it again in each test."""
    gc.collect()
    gc.freeze()


def _leave_out_tests_of_cpus(config, items):
    """Only tests of pools, whose ranks compute on the chosen device, and those named after it."""
    of_pools = [item for item in items if any(name in item.fixturenames for name in POOLS)]
    chosen = {item for item in of_pools if item.get_closest_marker("on_cpus") is None}
    chosen |= {item for item in items if item.path.stem.endswith("_cuda")}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _leave_to_the_full_sweep(variants):
    """Of four variants or more in the sweep, three quarters are run by `make full` alone.

    The quarter that stays is drawn by names: every n-th one would take the same value of an inner parameter each time.
    Tests that draw anew in each slice stay all.
    """
    if variants[0].get_closest_marker("drawn_anew") is not None:
        return
    drawn = sorted(variants, key=lambda item: zlib.crc32(item.nodeid.encode()))
    for item in drawn[-(-len(drawn) // 4) :] if len(drawn) >= 4 else []:
        item.add_marker(pytest.mark.full)


def _leave_to_other_slices(config, items, number):
    """One of the slices, drawn by names: a promise that fails is seen by the next commits."""

    def drawn(item):  # tests that count what others of their file did run in one slice
        name = item.nodeid.partition("::")[0] if item.get_closest_marker("one_slice") else item.nodeid
        return zlib.crc32(name.encode())

    others = [item for item in items if (drawn(item) - number) % _SLICES]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _one_thread_one_seed(request):
    if "torch_free" in request.keywords:
        yield
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


# -- processes --------------------------------------------------------------------------------------------------------

_started: list[str] = []
_ASKED_FOR = ("ninja",)  # by `transformers`, once in a process: whether it can build kernels


def _note(event, args):
    if event == "subprocess.Popen" and args[0] not in _ASKED_FOR:
        _started.append(str(args[0]))


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def _processes_are_marked_and_ended(request):
    """A test that starts processes is marked `processes`, and none of them outlives it but those of a pool."""
    before, _started[:] = children(), []
    yield
    is_marked = "processes" in request.keywords
    assert is_marked or not _started, f"starts {_started} and is not marked `processes`"
    left = children() - before - servers()
    assert not left, f"processes {sorted(left)} outlive the test"


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    ids: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            ids |= {int(pid) for pid in listing.read_text().split()}
    return {pid for pid in ids if not _has_ended(pid)}


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def servers() -> set[int]:
    """The server that ranks are forked from, and its helper. Ranks are its children, not ours."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _pool(size: int):
    from tests.support.processes import Pool

    pool = Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_processes():
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_processes():
    yield from _pool(4)


@pytest.fixture(scope="session")
def eight_processes():
    yield from _pool(8)
