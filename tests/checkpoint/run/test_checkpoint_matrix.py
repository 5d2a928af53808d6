"""Any mesh loads what any mesh saved: weights and optimizer state are bit-equal, and training goes on as it would
have."""

from __future__ import annotations

import pytest

from tests.checkpoint import checkpoint_jobs as jobs

MESHES: dict[str, tuple[dict, dict]] = {
    "one": ({"tp": 1}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp4": ({"tp": 4}, {"sequence_parallel": True}),
    "pp2": ({"pp": 2}, {}),
    "dp2-zero0": ({"dp": 2}, {"zero": 0}),
    "dp2-zero1": ({"dp": 2}, {"zero": 1}),
    "dp4-zero3": ({"dp": 4}, {"zero": 3}),
    "dp2-tp2-zero2": ({"dp": 2, "tp": 2}, {"zero": 2}),
    "dp2-tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp2-tp2": ({"pp": 2, "tp": 2}, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "pp2-dp2-tp2-zero1": ({"pp": 2, "dp": 2, "tp": 2}, {"zero": 1}),
    "dp_replicate2-dp2-tp2-zero3": ({"dp_replicate": 2, "dp": 2, "tp": 2}, {"zero": 3}),
    "pp4-dp2-zero2": ({"pp": 4, "dp": 2}, {"zero": 2}),
}
QUICK = ("one", "tp4", "dp2-tp2-zero3", "pp2-dp2-tp2-zero1")  # of llama, in `make test`; `make sweep` runs all
CONFIGURATIONS = [
    pytest.param(family, target, marks=[] if family == "llama" and target in QUICK else [pytest.mark.sweep])
    for family in ("llama", "gpt2", "phi3")
    for target in MESHES
]


@pytest.fixture(scope="module")
def pools(two_processes, four_processes, eight_processes):
    return {2: two_processes, 4: four_processes, 8: eight_processes}


def run(pools, job, axes, *args):
    world = 1
    for size in axes.values():
        world *= size
    if world > 1:
        return pools[world].run(job, *args, timeout_s=240)
    return pools["one"].run(job, *args, timeout_s=240)


@pytest.fixture(scope="module")
def one_process():
    from tests.support.processes import Pool

    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def saved(pools, one_process, tmp_path_factory):
    """family -> mesh -> (folder, losses of the steps after), made when first asked for."""
    pools["one"] = one_process
    folders: dict[str, dict] = {}

    def of(family):
        if family not in folders:
            root = tmp_path_factory.mktemp(family)
            folders[family] = {
                name: (str(root / name), run(pools, jobs.save_source, axes, family, axes, options, str(root / name))[0])
                for name, (axes, options) in MESHES.items()
            }
        return folders[family]

    return of


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("family", "target"), CONFIGURATIONS)
def test_every_mesh_loads_what_every_mesh_saved(pools, saved, family, target):
    axes, options = MESHES[target]
    wrong = run(pools, jobs.load_sources, axes, family, axes, options, saved(family))
    assert not [text for rank in wrong for text in rank]


MIXTURES: dict[str, tuple[dict, dict]] = {
    "dp4-zero0": ({"dp": 4}, {"zero": 0}),
    "dp4-ep4-zero2": ({"dp": 4}, {"zero": 2, "ep": 4}),
    "dp4-ep2-zero3": ({"dp": 4}, {"zero": 3, "ep": 2}),
    "tp4-ep2": ({"tp": 4}, {"ep": 2}),
    "dp2-tp2-ep4-zero1": ({"dp": 2, "tp": 2}, {"zero": 1, "ep": 4}),
    "dp2-tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "dp4-ep2-etp2-zero0": ({"dp": 4}, {"zero": 0, "ep": 2, "etp": 2}),
    "dp4-etp2-zero3": ({"dp": 4}, {"zero": 3, "etp": 2}),
    "dp2-tp2-etp2-zero1": ({"dp": 2, "tp": 2}, {"zero": 1, "etp": 2}),
    "pp2-dp2-ep2-zero1": ({"pp": 2, "dp": 2}, {"zero": 1, "ep": 2}),
}


@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.parametrize("target", MIXTURES)
def test_experts_go_from_any_folding_to_any_other(four_processes, tmp_path, target):
    """Six experts, of which four ranks have one or two; with the optimizer's state."""
    folders = {}
    for name, (axes, options) in MIXTURES.items():
        root = str(tmp_path / name)
        folders[name] = (root, four_processes.run(jobs.save_source, "mixtral", axes, options, root, timeout_s=240)[0])
    axes, options = MIXTURES[target]
    wrong = four_processes.run(jobs.load_sources, "mixtral", axes, options, folders, timeout_s=240)
    assert not [text for rank in wrong for text in rank]
