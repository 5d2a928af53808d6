"""Which launcher started a process, from recorded environments; a head node that does not resolve is an error."""

from __future__ import annotations

import pytest

from parallelize.base.errors import LaunchError
from parallelize.base.mesh import MeshSpec
from parallelize.launch.environment.head_node import own_address, resolve_head
from parallelize.launch.environment.launcher import (
    SUPERVISOR,
    Launcher,
    expand_hosts,
    find_launcher,
    set_torch_variables,
)
from parallelize.launch.environment.rank_map import crossing_groups, expert_groups, rank_map

pytestmark = pytest.mark.torch_free

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "run-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
}


def test_torchrun_gives_a_rank():
    launcher = find_launcher(TORCHRUN)
    assert (launcher.kind, launcher.rank, launcher.local_rank, launcher.world_size) == ("torchrun", 5, 1, 8)
    assert launcher.sentence(8).startswith("torchrun: 8 ranks, 4 on this node, head node node0:29500")
    assert "started by this command" in find_launcher({**TORCHRUN, SUPERVISOR: "1"}).by


def test_srun_gives_a_rank_or_a_node():
    launcher = find_launcher(SRUN)
    assert (launcher.kind, launcher.rank, launcher.local_rank, launcher.head) == ("srun", 5, 1, "gpu07")
    assert launcher.host_of(3) == "gpu07" and launcher.host_of(4) == "gpu08"
    other = find_launcher({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert other.port == launcher.port  # all tasks of a step find the same
    node = find_launcher({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_GPUS_ON_NODE": "4"})
    assert node.starts_ranks and (node.nodes, node.node_rank, node.ranks_per_node) == (2, 1, 4)
    variables: dict[str, str] = {}
    set_torch_variables(launcher, variables)
    assert variables["MASTER_ADDR"] == "gpu07" and variables["RANK"] == "5"


def test_pods_and_tasks_of_ray_give_a_node():
    launcher = find_launcher(POD)
    assert launcher.kind == "kubernetes" and launcher.starts_ranks
    assert (launcher.nodes, launcher.node_rank, launcher.ranks_per_node, launcher.head) == (2, 1, 8, "run-master-0")
    without_operator = {name: value for name, value in POD.items() if not name.startswith("PET_")}
    assert find_launcher(without_operator).node_rank == 1
    assert find_launcher({**POD, "RAY_JOB_ID": "01"}).kind == "ray"
    trainjob = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    assert find_launcher(trainjob).kind == "kubernetes"


def test_nothing_gives_a_launcher_of_its_own():
    launcher = find_launcher({})
    assert launcher.starts_ranks and launcher.sentence(4) == "alone: starts 4 ranks (no launcher's variables are set)"


@pytest.mark.parametrize(
    ("environment", "slug"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "bad-environment"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "bad-environment"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "7"}, "bad-environment"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[1-"}, "bad-host-list"),
        ({**POD, "PET_NNODES": "1:4"}, "bad-environment"),
        ({"SLURM_JOB_ID": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, "not-under-srun"),
    ],
)
def test_environments_that_lack_something_are_refused(environment, slug):
    with pytest.raises(LaunchError, match=slug):
        find_launcher(environment)


def test_lists_of_hosts():
    assert expand_hosts("n[01-03,7],gpu5") == ["n01", "n02", "n03", "n7", "gpu5"]
    assert expand_hosts("a[1-2]b[1-2]") == ["a1b1", "a1b2", "a2b1", "a2b2"]
    for wrong in ("", "n[1-x]", "n[1-999999999]", "n]1["):
        with pytest.raises(LaunchError, match="bad-host-list"):
            expand_hosts(wrong)


def test_a_head_node_that_does_not_resolve_is_an_error():
    with pytest.raises(LaunchError, match="head-unresolved"):
        resolve_head(Launcher("srun", "", rank=0, head="no-such-host.invalid", port=1))
    with pytest.raises(LaunchError, match="head-is-loopback"):
        resolve_head(Launcher("srun", "", rank=0, world_size=8, local_world_size=4, head="127.0.0.1", port=1))
    assert resolve_head(Launcher("torchrun", "", rank=0, world_size=4, local_world_size=4, head="127.0.0.1", port=1))
    assert resolve_head(Launcher("alone", "")) == "" and own_address("127.0.0.1", 1) == "127.0.0.1"


def test_groups_of_tp_and_experts_stay_inside_nodes():
    placed = rank_map(MeshSpec(pp=2, dp=2, tp=4), 8, 8)
    assert placed.nodes == 2 and placed.lines()[1] == "node 1: ranks 8-15 (pp=1 dp=0 tp=0 to pp=1 dp=1 tp=3)"
    assert expert_groups(MeshSpec(dp=2, tp=2), 4) == [(0, 1, 2, 3)]
    for mesh, experts, slug in (
        (MeshSpec(dp=2, tp=16), 1, "crosses-nodes"),
        (MeshSpec(tp=4, dp=4), 1, "crosses-nodes"),
        (MeshSpec(dp=4, tp=4), 16, "crosses-nodes"),
        (MeshSpec(dp=3, tp=4), 1, "uneven-nodes"),
    ):
        with pytest.raises(LaunchError, match=slug):
            rank_map(mesh, experts, 8)
    assert not crossing_groups(MeshSpec(dp=2, tp=2), 1, {0: "a", 1: "a", 2: "b", 3: "b"})
