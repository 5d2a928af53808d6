"""Nodes with disks of their own: each keeps the files of its ranks, and a load sends to each rank what its node lacks.

Nodes are emulated: the ranks of a node, threads of this process, are given a folder that the other ranks are not given.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize import CheckpointError, GlobalBatches, Problem, Streams, build_mesh, load_checkpoint, rebuild
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.format.reader import TensorFile
from parallelize.checkpoint.run import local_tensors
from parallelize.checkpoint.run import snapshot as transfer
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.node_files import grouped
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.run.snapshot import Read, chunks_of, split_box
from tests.checkpoint.checkpoint_jobs import built, different, everything, small_model, train
from tests.checkpoint.run import crash_replay, fault_jobs
from tests.checkpoint.run.resume_jobs import Counter
from tests.checkpoint.small_checkpoints import linear
from tests.support.threads import run_ranks

T = torch.Tensor
STEP = "step-00000002"
TWO_NODES = {"dp": 2, "tp": 2}


def node_of(root: Path, rank: int, per_node: int) -> Path:
    return root / f"node-{rank // per_node}"


class SavedRun:
    """A run of four ranks on two nodes that was saved after two steps, and its full state."""

    def __init__(self, root: Path, axes: dict[str, int], options: dict[str, Any], per_node: int = 2):
        self.root, self.ranks = root, 4
        models = [small_model("llama") for _ in range(4)]

        def body(rank: int) -> dict[str, T]:
            parallel, optimizer = built("llama", axes, options, model=models[rank])
            train(parallel, optimizer, 0, 2)
            user, values = Counter(), {"best": torch.arange(40.0), "note": ("a", 1.5)}
            with Checkpointer(
                node_of(root, rank, per_node),
                parallel,
                optimizer=optimizer,
                user={"counter": user},
                streams=Streams(5, parallel.mesh),
                data=GlobalBatches(64, 16, seed=2, mesh=parallel.mesh),
                shared=False,
            ) as checkpoints:
                checkpoints.save(2, values)
            return everything(parallel, optimizer)

        self.state = run_ranks(self.ranks, body)[0]

    def wrong_after_resume(
        self, axes: dict[str, int], options: dict[str, Any], per_node: int, **more: Any
    ) -> list[list[str]]:
        """Names of each rank's tensors that a run on another mesh has otherwise than they were saved."""
        world = torch.Size(axes.values()).numel()
        models = [small_model("llama", seed=1) for _ in range(world)]

        def body(rank: int) -> list[str]:
            parallel, optimizer = built("llama", axes, options, model=models[rank])
            train(parallel, optimizer, 7, 1)
            user = Counter()
            user.seen = {}
            with Checkpointer(
                node_of(self.root, rank, per_node),
                parallel,
                optimizer=optimizer,
                user={"counter": user},
                data=GlobalBatches(64, 16, seed=2, mesh=parallel.mesh),
                shared=False,
            ) as checkpoints:
                step = checkpoints.resume(**more)
                values = checkpoints.values
            wrong = [] if step == 2 and values["note"] == ("a", 1.5) else ["step"]
            wrong += [] if torch.equal(values["best"], torch.arange(40.0)) else ["values"]
            wrong += [] if torch.equal(user.seen[3], torch.arange(4)) else ["user"]
            return wrong + different(parallel, optimizer, self.state)

        return run_ranks(world, body)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Replicas split small tensors, and transfers send many chunks."""
    monkeypatch.setattr(local_tensors, "SPLIT_BYTES", 256)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved once; tests copy it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_tensors, "SPLIT_BYTES", 256)
        return SavedRun(tmp_path_factory.mktemp("nodes") / "run", TWO_NODES, {"zero": 1})


@pytest.fixture
def copied(saved, tmp_path):
    """A copy, which the test may change."""
    copy = SavedRun.__new__(SavedRun)
    copy.root, copy.ranks, copy.state = tmp_path / "run", saved.ranks, saved.state
    shutil.copytree(saved.root, copy.root)
    return copy


def errors_of(ranks: int, work: Callable[[int], object]) -> list[CheckpointError]:
    """Each rank's error."""

    def body(rank: int) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            work(rank)
        return caught.value

    return run_ranks(ranks, body)


def checkpoints_of(rank: int, root: Path, world: int = 2, module: Any = None, **options: Any) -> Checkpointer:
    """Of a small replicated model, with one rank on each node."""
    return Checkpointer(
        root / f"node-{rank}", module or linear(), mesh=build_mesh("cpu", dp=world), shared=False, **options
    )


# -- what is saved, and what is loaded --------------------------------------------------------------------------------


def test_each_node_has_the_manifest_and_the_files_of_its_ranks(saved, tmp_path):
    listed = [sorted(os.listdir(saved.root / f"node-{node}" / STEP)) for node in (0, 1)]
    names = [f"rank-0000{rank}.safetensors" for rank in range(4)]
    assert listed == [["manifest.json", *names[:2]], ["manifest.json", *names[2:]]]
    manifests = [read_manifest(saved.root / f"node-{node}" / STEP) for node in (0, 1)]
    assert manifests[0].digest == manifests[1].digest
    assert [ranks for _, ranks in manifests[0].about["nodes"]] == [[0, 1], [2, 3]]
    for node in (0, 1):
        assert (saved.root / f"node-{node}" / "latest").read_text() == STEP + "\n"
        shutil.copytree(saved.root / f"node-{node}", tmp_path / "all", dirs_exist_ok=True)
    model = small_model("llama", seed=1)  # the folders of all nodes in one are an ordinary checkpoint
    assert load_checkpoint(tmp_path / "all", model) == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.state[f"model/{name}"])


@pytest.mark.sweep
def test_a_run_resumes_bit_equal_on_the_same_nodes(copied):
    assert copied.wrong_after_resume(TWO_NODES, {"zero": 1}, 2) == [[]] * 4


@pytest.mark.variants(every=14)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("axes", "options", "per_node"),
    [
        ({"tp": 2}, {}, 1),
        ({"pp": 2}, {}, 1),
        ({"dp": 2}, {"zero": 3}, 1),
        ({"pp": 2, "tp": 2}, {}, 2),
        ({"dp": 4}, {"zero": 2}, 2),
        ({"tp": 2, "dp": 2}, {"zero": 0}, 2),
        ({"dp": 2, "tp": 2}, {"zero": 1}, 1),  # nodes 2 and 3 are new
    ],
)
def test_another_mesh_resumes_bit_equal(copied, axes, options, per_node, check):
    assert all(wrong == [] for wrong in copied.wrong_after_resume(axes, options, per_node, check=check))


@pytest.mark.sweep
def test_a_model_on_meta_and_rebuilt_optimizers_are_filled_from_other_nodes(copied):
    models = [small_model("llama", seed=1) for _ in range(2)]

    def body(rank: int) -> list[str]:
        parallel, _ = built("llama", {"tp": 2}, {}, model=models[rank])
        rebuilt = rebuild(parallel, node_of(copied.root, rank, 1), shared=False)
        wrong = different(parallel, rebuilt.optimizers["optimizer"], copied.state)
        on_meta = models[rank].to("meta")
        load_checkpoint(node_of(copied.root, rank, 1), on_meta, mesh=parallel.mesh, shared=False)
        return wrong + different(parallel, rebuilt.optimizers["optimizer"], copied.state)

    assert run_ranks(2, body) == [[], []]


@pytest.mark.sweep
def test_a_node_without_its_folder_receives_everything(copied):
    """Replaced nodes have no files, and need none if some node has them: also where the first node is a new one."""
    shutil.copytree(copied.root / "node-0", copied.root / "node-1", dirs_exist_ok=True)
    shutil.rmtree(copied.root / "node-0")
    assert copied.wrong_after_resume(TWO_NODES, {"zero": 1}, 2) == [[]] * 4


def test_chunks_are_bounded_and_contain_every_element_once():
    reads = [
        Read("f", "a", ((3, 10), (0, 41), (2, 5)), "F64"),
        Read("f", "b", (), "BF16"),
        Read("f", "c", ((0, 9),), "I8"),
    ]
    sizes = []
    elements: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    for pieces, num_bytes in chunks_of(reads):
        sizes.append(num_bytes)
        assert [piece.start % 16 for piece in pieces] == [0] * len(pieces)
        for piece in pieces:
            index = torch.cartesian_prod(*(torch.arange(a, b) for a, b in piece.box)) if piece.box else torch.zeros(1)
            elements[piece.number] += [tuple(row) for row in index.reshape(len(index), -1).tolist()]
    assert max(sizes) <= 1000 + 16 and len(sizes) == 8
    assert (
        [len(set(rows)) for rows in elements.values()]
        == [7 * 41 * 3, 1, 9]
        == [len(rows) for rows in elements.values()]
    )
    assert list(split_box(((0, 2), (0, 3)), 1)) == [((a, a + 1), (b, b + 1)) for a in (0, 1) for b in (0, 1, 2)]


# -- what is refused --------------------------------------------------------------------------------------------------


def save_small(root: Path, steps: tuple[int, ...], world: int = 2, **options: Any) -> None:
    modules = [linear() for _ in range(world)]

    def body(rank: int) -> None:
        with checkpoints_of(rank, root, world, modules[rank], **options) as checkpoints:
            for step in steps:
                with torch.no_grad():
                    modules[rank][0].weight.fill_(step)
                checkpoints.save(step)

    run_ranks(world, body)


def listed(root: Path) -> list[list[str]]:
    """The names in the folder of each node."""
    return [sorted(set(os.listdir(path)) - {".lock"}) for path in sorted(root.iterdir())]


def test_folders_that_are_not_shared_are_refused_unless_it_is_said(tmp_path):
    def work(rank: int) -> None:
        Checkpointer(tmp_path / str(rank), linear(), mesh=build_mesh("cpu", dp=2))

    for error in errors_of(2, work):
        assert error.slugs == ("not-shared",) and "shared=False" in str(error)


def test_a_missing_node_is_named_with_its_files_and_tensors(copied, monkeypatch):
    host = read_manifest(copied.root / "node-0" / STEP).about["nodes"][1][0]
    shutil.rmtree(copied.root / "node-1")
    module = torch.nn.Linear(2, 2)

    def work(rank: int) -> None:
        load_checkpoint(node_of(copied.root, rank, 1), module, mesh=build_mesh("cpu", dp=2), shared=False)

    for error in errors_of(2, work):
        (problem,) = error.problems
        rows = dict(problem.rows)
        assert problem.slug == "missing-node-files" and problem.what == "2 of the 4 files of step 2 are missing"
        assert rows["node"] == f"node 1, host {host}, ranks 2, 3"
        assert rows["files"] == "rank-00002.safetensors, rank-00003.safetensors"
        assert "model/model.embed_tokens.weight" in rows["tensors"]
    with pytest.raises(CheckpointError) as caught:  # of a shared folder too, before anything is read
        load_checkpoint(copied.root / "node-0", small_model("llama"))
    assert caught.value.slugs == ("missing-node-files",) and "shared=False" in str(caught.value)


def test_damage_on_a_node_that_only_reads_for_others_is_an_error_on_every_rank(copied):
    """Of a layer of the second stage, on the node of the first: nothing is changed on either rank."""
    tensor = read_manifest(copied.root / "node-0" / STEP).tensors["model/model.layers.3.mlp.up_proj.weight"]
    part = next(part for part in tensor.slices if (copied.root / "node-0" / STEP / part.file).exists())
    path = copied.root / "node-0" / STEP / part.file
    with TensorFile(path.parent, path.name) as file:
        start = file.entry(part.key).start
    data = bytearray(path.read_bytes())
    data[start + 5] ^= 1
    path.write_bytes(data)
    models = [small_model("llama", seed=1) for _ in range(2)]
    before = {name: value.clone() for name, value in models[0].state_dict().items()}

    def work(rank: int) -> None:
        parallel, _ = built("llama", {"pp": 2}, {}, model=models[rank])
        load_checkpoint(node_of(copied.root, rank, 1), parallel, shared=False)

    for error in errors_of(2, work):
        assert error.slugs == ("corrupt-tensor",) and path.name in str(error) and "up_proj" in str(error)
    for model in models:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_disk_that_fails_while_it_reads_for_others_is_an_error_on_every_rank(copied, monkeypatch):
    failed = CheckpointError(Problem("unreadable-file", "byte 7 cannot be read"))
    real = transfer.Transfer._read
    monkeypatch.setattr(
        transfer.Transfer, "_read", lambda self, *rest: failed if self.sync.rank == 1 else real(self, *rest)
    )
    models = [small_model("llama", seed=1) for _ in range(2)]

    def work(rank: int) -> None:
        parallel, _ = built("llama", {"pp": 2}, {}, model=models[rank])
        load_checkpoint(node_of(copied.root, rank, 1), parallel, shared=False)

    for error in errors_of(2, work):
        assert error.slugs == ("unreadable-file",)


def test_what_a_node_has_is_not_sent_to_its_ranks(tmp_path, monkeypatch):
    """Stages that resume on their nodes receive nothing but the first rank's random generators."""
    sent: list[int] = []
    real = RankSync.swap
    monkeypatch.setattr(
        RankSync,
        "swap",
        lambda self, outgoing, incoming: (
            sent.extend(data.numel() for data in outgoing.values()),
            real(self, outgoing, incoming),
        )[1],
    )
    models = [small_model("llama", seed=1) for _ in range(2)]

    def body(rank: int) -> int:
        parallel, optimizer = built("llama", {"pp": 2}, {}, model=models[rank])
        train(parallel, optimizer, 0, 1)
        with Checkpointer(tmp_path / f"node-{rank}", parallel, optimizer=optimizer, shared=False) as checkpoints:
            checkpoints.save(1)
            return checkpoints.resume()

    assert run_ranks(2, body) == [1, 1]
    saved_bytes = sum(path.stat().st_size for path in tmp_path.glob("node-*/*/*.safetensors"))
    assert sum(sent) < 16_000 < saved_bytes / 20, (sum(sent), saved_bytes)


def test_nodes_with_different_checkpoints_of_a_step_are_refused(tmp_path):
    save_small(tmp_path / "a", (1,))
    save_small(tmp_path / "b", (1,), keep_last=3)
    shutil.rmtree(tmp_path / "a" / "node-1")
    shutil.copytree(tmp_path / "b" / "node-1", tmp_path / "a" / "node-1")
    manifest = tmp_path / "a" / "node-1" / "step-00000001" / "manifest.json"
    changed = read_manifest(manifest.parent)
    changed.about["saved_at"] = "2000-01-01T00:00:00Z"
    manifest.write_bytes(changed.to_bytes())

    def work(rank: int) -> None:
        with checkpoints_of(rank, tmp_path / "a") as checkpoints:
            checkpoints.resume()

    for error in errors_of(2, work):
        assert error.slugs == ("other-checkpoint",)


def test_a_step_that_no_node_has(tmp_path):
    save_small(tmp_path, (1,))

    def work(rank: int) -> None:
        load_checkpoint(tmp_path / f"node-{rank}", linear(), step=3, mesh=build_mesh("cpu", dp=2), shared=False)

    for error in errors_of(2, work):
        assert error.slugs == ("no-checkpoint",) and "existing steps" in str(error)


def test_ranks_that_see_files_of_each_other_only_in_part():
    assert grouped([[0, 2], [1], [0, 2]], Path("run")) == ((0, 2), (1,))
    for views in ([[0, 1], [1]], [[0], []], [[0, 1], [0, 1, 2], [1, 2]]):
        with pytest.raises(CheckpointError) as caught:
            grouped(views, Path("run"))
        assert caught.value.slugs == ("folders-differ",)


# -- several saves, and faults of disks --------------------------------------------------------------------------------


def test_retention_and_setting_aside_are_the_same_on_every_node(tmp_path):
    save_small(tmp_path, (10, 20, 30, 40, 50), keep_last=2, keep_every=20)
    assert listed(tmp_path) == [["latest", "step-00000020", "step-00000040", "step-00000050"]] * 2
    modules = [linear(1), linear(1)]

    def body(rank: int) -> list[Any]:
        with checkpoints_of(rank, tmp_path, module=modules[rank]) as checkpoints:
            steps = [checkpoints.resume(), checkpoints.resume(20, set_aside=True), checkpoints.resume()]
            return [*steps, float(modules[rank][0].weight[0, 0])]

    assert run_ranks(2, body) == [[50, 20, 20, 20.0]] * 2
    for names in listed(tmp_path):
        assert [name for name in names if not name.startswith(".")] == ["latest", "step-00000020"]


def test_one_folder_of_all_ranks_is_one_node(tmp_path):
    def body(rank: int) -> tuple[int, int]:
        with Checkpointer(tmp_path, linear(), mesh=build_mesh("cpu", dp=2), shared=False) as checkpoints:
            checkpoints.save(1)
            return len(checkpoints._folder.nodes.ranks), checkpoints.resume()

    assert run_ranks(2, body) == [(1, 1), (1, 1)]
    assert "nodes" not in read_manifest(tmp_path / "step-00000001").about


@pytest.mark.parametrize("phase", ["begin", "prepare", "commit"])
def test_a_disk_that_fails_on_one_node_fails_the_save_on_all(tmp_path, monkeypatch, phase):
    """Nothing is left of it, also of nodes that have renamed their folder; and the next save is a good one."""
    save_small(tmp_path, (1,))
    real, failing = getattr(folders, phase), [True]

    def fails(path: Path, *rest: Any) -> Any:
        if failing and f"{os.sep}node-1" in str(path):
            with disk.reporting_errors(path):
                raise OSError(errno.EIO, "Input/output error")
        return real(path, *rest)

    monkeypatch.setattr(folders, phase, fails)
    modules = [linear(), linear()]

    def body(rank: int) -> tuple[tuple[str, ...], list[list[str]], int]:
        with checkpoints_of(rank, tmp_path, module=modules[rank]) as checkpoints:
            with pytest.raises(CheckpointError) as caught:
                checkpoints.save(2)
            checkpoints._sync.all_gather(None)
            left = listed(tmp_path)
            checkpoints._sync.all_gather(None)
            failing.clear()
            checkpoints.save(3)
            return caught.value.slugs, left, checkpoints.resume()

    assert run_ranks(2, body) == [(("write-failed",), [["latest", "step-00000001"]] * 2, 3)] * 2


def test_a_rename_that_cannot_be_taken_back_is_completed_by_the_next_run(tmp_path, monkeypatch):
    """Nothing is removed then: the step is complete on every node."""
    save_small(tmp_path, (1,))
    commit = folders.commit

    def fails(path: Path, *rest: Any) -> Any:
        with disk.reporting_errors(path):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "commit", lambda root, *rest: (fails if root.name == "node-1" else commit)(root, *rest))
        patch.setattr(folders, "retract", fails)
        for error in errors_of(2, lambda rank: save_on_node(rank, tmp_path, 2)):
            assert error.slugs == ("write-failed",)
    modules = [linear(1), linear(1)]

    def body(rank: int) -> int:
        with checkpoints_of(rank, tmp_path, module=modules[rank]) as checkpoints:
            return checkpoints.resume()

    assert run_ranks(2, body) == [2, 2]
    assert listed(tmp_path) == [["latest", "step-00000001", "step-00000002"]] * 2


def save_on_node(rank: int, root: Path, step: int) -> None:
    with checkpoints_of(rank, root) as checkpoints:
        checkpoints.save(step)


def test_one_process_is_one_node(tmp_path):
    with Checkpointer(tmp_path, linear(1), shared=False) as checkpoints:
        assert checkpoints.resume() == 0
        checkpoints.save(1)
    module = linear(2)
    assert load_checkpoint(tmp_path, module, shared=False) == 1
    assert torch.equal(module[0].weight, linear(1)[0].weight)


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_crash_between_the_renames_of_two_nodes_is_completed(tmp_path, renamed):
    """One node has published step 2, the other has it complete and not renamed: the next run publishes it there."""
    save_small(tmp_path, (1, 2))
    other = tmp_path / f"node-{1 - renamed}"
    os.rename(other / "step-00000002", other / ".step-00000002.writing-0123456789ab")
    (other / "latest").write_text("step-00000001\n")
    modules = [linear(1), linear(1)]

    def body(rank: int) -> tuple[int, float]:
        with checkpoints_of(rank, tmp_path, module=modules[rank]) as checkpoints:
            return checkpoints.resume(), float(modules[rank][0].weight[0, 0])

    assert run_ranks(2, body) == [(2, 2.0)] * 2
    assert listed(tmp_path) == [["latest", "step-00000001", "step-00000002"]] * 2
    assert (other / "latest").read_text() == "step-00000002\n"


def test_a_checkpoint_that_no_node_has_published_is_removed(tmp_path):
    save_small(tmp_path, (1, 2))
    for node in (0, 1):
        folder = tmp_path / f"node-{node}"
        os.rename(folder / "step-00000002", folder / ".step-00000002.writing-0123456789ab")
        (folder / "latest").write_text("step-00000001\n")
    modules = [linear(1), linear(1)]

    def body(rank: int) -> tuple[int, float]:
        with checkpoints_of(rank, tmp_path, module=modules[rank]) as checkpoints:
            return checkpoints.resume(), float(modules[rank][0].weight[0, 0])

    assert run_ranks(2, body) == [(1, 1.0)] * 2
    assert listed(tmp_path) == [["latest", "step-00000001"]] * 2


def test_a_folder_of_a_node_has_one_writer(tmp_path):
    save_small(tmp_path, (1,))
    lock = folders.Lock(tmp_path / "node-1")
    try:
        for error in errors_of(2, lambda rank: checkpoints_of(rank, tmp_path)):
            assert error.slugs == ("folder-in-use",)
    finally:
        lock.release()
    save_small(tmp_path, (2,))


@pytest.mark.sweep
def test_power_may_fail_on_both_nodes_at_any_moment_of_a_save(tmp_path):
    """Each disk loses any part of what was not flushed: the next run resumes from step 1 or 2, the same on both
    nodes."""
    base, copy = tmp_path / "base", tmp_path / "copy"
    base.mkdir()
    logs: list[Any] = []

    def save_twice(rank: int) -> None:
        bench = fault_jobs.Bench("plain", 2)
        with bench.checkpointer(base / f"node-{rank}", shared=False) as checkpoints:
            bench.set(1)
            checkpoints.save(1, values={"step": 1})
            checkpoints._sync.all_gather(None)
            if rank == 0:
                logs.append(crash_replay.read_tree(base))
                logs.append(crash_replay.recorded(base))
                logs.append(logs[1].__enter__())
            checkpoints._sync.all_gather(None)
            bench.set(2)
            checkpoints.save(2, values={"step": 2})
            checkpoints._sync.all_gather(None)
            if rank == 0:
                logs[1].__exit__(None, None, None)

    run_ranks(2, save_twice)
    before, _, log = logs
    trees = {}
    for prefix, name, tree in crash_replay.outcomes(before, log, seed=22, tries=30):
        trees.setdefault(crash_replay.key_of(tree), (prefix, name, tree))

    def resume_each(rank: int) -> list[tuple[int, str, int, list[str]]]:
        bench, found = fault_jobs.Bench("plain", 2), []
        for prefix, name, tree in trees.values():
            if rank == 0:
                crash_replay.write_tree(copy, tree)
            dist.barrier()
            bench.set(0)
            try:
                with bench.checkpointer(copy / f"node-{rank}", shared=False) as checkpoints:
                    step = checkpoints.resume()
                    found.append((prefix, name, step, bench.differs(step)))
            except CheckpointError as error:
                found.append((prefix, name, 0, [str(error)]))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(copy)
        return found

    for found in run_ranks(2, resume_each):
        wrong = [row for row in found if row[3] or (row[0] == len(log) and row[2] != 2)]
        assert not wrong, (len(wrong), len(found), wrong[:3])
        assert {step for _, _, step, _ in found} == {1, 2} and len(found) > 150, len(found)
