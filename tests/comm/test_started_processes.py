"""A mesh as the first call of a script: as many processes as it needs, or the line that starts them. No rank waits for
another."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from parallelize import MeshError, build_mesh
from parallelize.comm import meshes
from parallelize.comm.groups import destroy_groups
from tests.support.refused import refused, small_mesh

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""By these variables PyTorch would wait for a rank 0 that does not exist."""


@pytest.fixture(autouse=True)
def a_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/first.py"])
    monkeypatch.setattr(meshes, "publish_uncaught_errors", lambda: None)
    for name in (*LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2, "dp": 2, "tp": 2}])
def test_a_script_that_no_launcher_started(sizes):
    ranks = 2 ** len(sizes)
    line = f"torchrun --nproc-per-node {ranks} first.py;"
    with refused(MeshError, "wrong-world-size", f"needs {ranks} ranks, and 1 process runs (no launcher", line):
        build_mesh("cpu", **sizes)
    assert not dist.is_initialized()


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"dp": 1, "tp": 1}])
def test_a_mesh_of_one_needs_no_launcher(sizes):
    try:
        mesh = build_mesh("cpu", **sizes)
        assert (mesh.size(), tuple(mesh.shape), dist.get_world_size()) == (1, (1,) * len(sizes), 1)
        assert build_mesh("cpu", tp=1).size() == 1  # in the group of the first one
        with refused(MeshError, "wrong-world-size", "tp=2 needs 2 ranks, and 1 process runs"):
            build_mesh("cpu", tp=2)
    finally:
        destroy_groups()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_more_or_fewer_processes_than_ranks(size, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    needed = "1 rank," if size == 1 else f"{size} ranks,"
    line = f"torchrun --nproc-per-node {size} first.py; or sizes that multiply to 2"
    with refused(MeshError, "wrong-world-size", f"dp={size} needs {needed} and 2 processes run (WORLD_SIZE", line):
        build_mesh("cpu", dp=size)


def test_the_line_names_the_nodes_of_the_job(monkeypatch):
    for name, value in (LAUNCHED | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["first.py", "--steps", "3"])
    with refused(MeshError, "wrong-world-size", "torchrun --nnodes 2 --nproc-per-node 8 first.py ...;"):
        build_mesh("cpu", dp=2, tp=8)


@pytest.mark.parametrize("name", LAUNCHED)
def test_variables_of_a_launcher_that_are_missing(name, monkeypatch):
    for other, value in LAUNCHED.items():
        if other != name:
            monkeypatch.setenv(other, value)
    with refused(MeshError, "bad-environment", f"but not {name}", "torchrun --nproc-per-node 2 first.py"):
        build_mesh("cpu", tp=2)


def test_a_number_of_processes_that_is_no_number(monkeypatch):
    for name, value in (LAUNCHED | {"WORLD_SIZE": "many"}).items():
        monkeypatch.setenv(name, value)
    with refused(MeshError, "bad-environment", "'many'"):
        build_mesh("cpu", tp=2)


@pytest.mark.parametrize("size", [2, 8])
def test_a_group_of_another_size(size):
    with small_mesh(tp=4), refused(MeshError, "wrong-world-size", f"tp={size} needs {size} ranks, and 4 processes run"):
        build_mesh("cpu", tp=size)
