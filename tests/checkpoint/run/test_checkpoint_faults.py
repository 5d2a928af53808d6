"""A save that is interrupted at any point, on any rank or by the disk, leaves the last good checkpoint or the new one,
complete.

Each fault: a good save of step 1, then a save of step 2 into the same folder with one fault at operation n of one rank.
Operations are those of `parallelize/checkpoint/format/disk.py`, counted in a run without a fault, so new ones are
included.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from tests.checkpoint.run import crash_replay, fault_jobs

pytestmark = [pytest.mark.processes, pytest.mark.one_slice, pytest.mark.xdist_group("ranks")]  # the faults are counted
REPOSITORY = Path(__file__).parents[3]
SERVERS = 4  # ranks wait for each other more than they compute
MOST_HANGING = 4  # each takes long, and so many tell enough
FEWEST_FAULTS = 300

Config = dict[str, Any]
WRITING = {"create", "write", "write_at", "write_file", "make_folder", "rename", "replace", "replace_file"}
SYNCING = {"flush", "flush_folder"}


class Servers:
    """Fork servers that run tests."""

    def __init__(self, work: Path):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.all = []
        for number in range(SERVERS):
            (work / str(number)).mkdir()
            command = [sys.executable, "-m", "tests.checkpoint.run.fault_jobs", str(work / str(number))]
            pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.all.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes))

    def run(self, configs: list[Config]) -> list[dict[str, Any]]:
        """The result of each test, in their order."""
        results: list[Any] = [None] * len(configs)
        waiting = list(enumerate(configs))[::-1]

        def serve(server: Any) -> None:
            while waiting:
                try:
                    number, config = waiting.pop()
                except IndexError:
                    return
                server.stdin.write(json.dumps(config) + "\n")
                server.stdin.flush()
                answer = server.stdout.readline()
                if not answer:
                    return
                results[number] = json.loads(answer)
                hanging = sum("hangs" in answer for answer in map(json.dumps, filter(None, results)))
                if hanging >= MOST_HANGING:
                    waiting.clear()

        threads = [threading.Thread(target=serve, args=(server,)) for server in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = [result for result in results if result is not None]
        assert len(done) == len(configs) or "hangs" in json.dumps(done), "a fork server has ended"
        return done

    def close(self) -> None:
        for server in self.all:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@pytest.fixture(scope="module")
def servers():
    """In memory where possible: other tests check what reaches a disk."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home) as work:
        running = Servers(Path(work))
        yield running
        running.close()


@pytest.fixture(scope="module")
def survived():
    """Number of faults of each kind that were survived, over all tests of this file."""
    return Counter()


def config_of(**options: Any) -> Config:
    default = dict(
        world=1, per_node=0, layout="plain", asynchronous=False, keep_last=None, victim=0, kind="none", at=-1
    )
    return {**default, **options}


def counted(servers: Servers, variants: list[Config]) -> list[list[list[str]]]:
    """The operations of every rank of each variant, in a run without a fault."""
    results = servers.run(variants)
    bad = [r for r in results if r["checked"].get("wrong") != [] or r["checked"].get("step") != 2]
    assert not bad, bad[:2]
    return [[rank["seen"] for rank in result["ranks"]] for result in results]


def kinds_at(name: str) -> list[str]:
    """What can go wrong at an operation."""
    if name == "close":
        return ["EIO"]
    kinds = ["kill-before", "kill-after"]
    if name in ("write", "write_at"):
        kinds += ["kill-half", "ENOSPC", "ENOSPC-half", "EIO"]
    elif name in WRITING:
        kinds += ["ENOSPC" if name in ("create", "make_folder") else "EIO"]
    elif name in SYNCING or name in ("remove_file", "os.unlink", "os.rmdir"):
        kinds += ["EIO"]
    return kinds


def wrong_with(result: dict[str, Any]) -> list[str]:
    """Everything that is not as it should be."""
    config, ranks, checked = result["config"], result["ranks"], result["checked"]
    wrong = list(checked.get("wrong", [f"the check {checked}"]))
    for rank, answer in enumerate(ranks):
        outcome, victim = answer["outcome"], rank == config["victim"]
        if config["kind"].startswith("kill"):
            fine = outcome == "ended with -9" if victim else outcome == "CheckpointError rank-lost"
            fine = fine or (not victim and outcome == "saved" and checked.get("step") == 2)
        elif config["kind"].startswith("E") and not config.get("ignored"):
            fine = outcome == "CheckpointError write-failed" and answer.get("later") == "saved"
            if fine and not all(word in answer["text"] for word in named_in(config)):
                wrong.append(f"rank {rank}: no {named_in(config)} in {answer['text']}")
        else:
            fine = outcome == "saved" and checked.get("step") in (2, 3)
        if not fine:
            wrong.append(f"rank {rank}: {outcome}, later {answer.get('later')}: {answer.get('text', '')[-600:]}")
    return wrong


def named_in(config: Config) -> list[str]:
    """What an error must say: where and why; and how much space is needed, where data are written."""
    cause = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}[config["kind"].removesuffix("-half")]
    return ["path", "/run", cause, *(["needs", "free:"] if config["name"] in ("write", "write_at", "create") else [])]


def swept(servers: Servers, configs: list[Config], survived: Counter) -> None:
    results = servers.run(configs)
    wrong = [(result["config"], errors) for result in results if (errors := wrong_with(result))]
    injected = Counter(result["config"]["kind"] for result in results)
    survived.update(injected)
    text = f"{len(configs)} injected faults, {len(configs) - len(wrong)} survived; {dict(injected)}"
    print(text)
    assert not wrong, f"{text}\n" + "\n".join(f"{config}: {errors}" for config, errors in wrong[:12])


def points(variant: Config, seen: list[list[str]], kinds: Any = None) -> list[Config]:
    """A config for every operation of the victim, and every way in which it may fail."""
    names = seen[variant["victim"]]
    return [
        {**variant, "at": at, "kind": kind, "name": name, "ignored": name == "close"}
        for at, name in enumerate(names)
        for kind in kinds_at(name)
        if kinds is None or kind in kinds
    ]


# -- the sweeps --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_one_process_survives_every_fault_at_every_operation(servers, survived):
    variant = config_of()
    configs = points(variant, counted(servers, [variant])[0])
    configs.append(config_of(kind="short", name="write"))
    swept(servers, configs, survived)


@pytest.mark.sweep
def test_a_save_in_the_background_survives_every_fault(servers, survived):
    variant = config_of(asynchronous=True)
    configs = points(variant, counted(servers, [variant])[0], ("kill-before", "kill-half", "ENOSPC", "EIO"))
    swept(servers, configs + [{**variant, "kind": "short", "name": "write"}], survived)


@pytest.mark.sweep
def test_two_ranks_survive_the_loss_of_either_and_failing_disks(servers, survived):
    variants = [
        config_of(world=2, victim=0),
        config_of(world=2, victim=1, layout="tp", asynchronous=True),
        config_of(world=2, victim=1),
        config_of(world=2, victim=0, layout="tp"),
    ]
    seen = counted(servers, variants)
    configs = points(variants[0], seen[0], ("kill-after", "kill-half", "EIO"))[::2]
    configs += points(variants[1], seen[1], ("kill-before", "ENOSPC", "EIO"))
    configs += points(variants[2], seen[2], ("kill-after", "ENOSPC-half"))
    configs += points(variants[3], seen[3], ("kill-before", "ENOSPC"))[1::2]
    swept(servers, configs, survived)


@pytest.mark.sweep
def test_nodes_without_a_shared_folder_survive_the_loss_of_either_and_failing_disks(servers, survived):
    """A checkpoint that only some nodes have published is published on all by the next run, or on none."""
    variants = [
        config_of(world=2, per_node=1, victim=0),
        config_of(world=2, per_node=1, victim=1, layout="tp", asynchronous=True),
        config_of(world=4, per_node=2, victim=2),
        config_of(world=2, per_node=1, victim=1, keep_last=1),
    ]
    seen = counted(servers, variants)
    configs = points(variants[0], seen[0], ("kill-after", "kill-half", "EIO"))
    configs += points(variants[1], seen[1], ("kill-before", "ENOSPC", "EIO"))
    configs += points(variants[2], seen[2], ("kill-before", "EIO"))[::2]
    configs += points(variants[3], seen[3], ("kill-before", "kill-after"))[::2]
    swept(servers, configs, survived)


@pytest.mark.sweep
def test_four_ranks_survive_the_loss_of_the_first_and_of_the_last(servers, survived):
    variants = [config_of(world=4, victim=0, asynchronous=True), config_of(world=4, victim=3, layout="tp")]
    seen = counted(servers, variants)
    configs = points(variants[0], seen[0], ("kill-before", "EIO"))[::3]
    configs += points(variants[1], seen[1], ("kill-after", "ENOSPC"))[::2]
    swept(servers, configs, survived)


@pytest.mark.sweep
def test_interrupted_retention_leaves_the_newest(servers, survived):
    """What removes step 1 comes after all that makes step 2."""
    variants = [config_of(keep_last=1), config_of(keep_last=1, world=2, asynchronous=True)]
    with_it, without = counted(servers, variants), counted(servers, [config_of(), config_of(world=2)])
    configs = []
    for variant, seen, plain in zip(variants, with_it, without, strict=True):
        assert seen[0][: len(plain[0])] == plain[0], "retention began before the new checkpoint was there"
        assert len(seen[0]) > len(plain[0])
        configs += [
            config for config in points(variant, seen, ("kill-before", "kill-after")) if config["at"] >= len(plain[0])
        ]
    removal = range(len(without[0][0]), len(with_it[0][0]))
    fails = [
        {**variants[0], "at": at, "kind": "EIO", "name": name, "ignored": name == "close" or name.startswith("os.")}
        for at, name in enumerate(with_it[0][0])
        if at in removal and name != "remove_folder"
    ]
    swept(servers, configs + fails, survived)


@pytest.mark.sweep
def test_a_failed_removal_is_an_error_on_every_rank(servers):
    variant = config_of(keep_last=1, world=2)
    seen, plain = counted(servers, [variant, config_of(world=2)])
    at = len(plain[0])
    assert seen[0][at] == "rename"
    swept(servers, [{**variant, "at": at, "kind": "EIO", "name": "rename"}], Counter())


@pytest.mark.sweep
def test_a_kill_before_anything_is_saved_changes_nothing(servers, survived):
    """Kills while `Checkpointer` locks its folder: step 1 stays, and nothing else."""
    variant = config_of(early=True)
    seen = counted(servers, [variant])[0]
    number = seen[0].index("make_folder")
    configs = [
        config for config in points(variant, seen, ("kill-before", "kill-after", "kill-half")) if config["at"] < number
    ]
    assert len(configs) >= 8
    swept(servers, configs, survived)


@pytest.mark.sweep
def test_no_rank_waits_for_ranks_that_failed_but_still_run(servers):
    """A rank that has seen the loss and still runs does not block ranks that have not seen it."""
    configs = [
        config_of(world=4, victim=victim, kind="kill-before", at=5, name="write", lingers=True) for victim in (2, 3)
    ]
    swept(servers, configs, Counter())


@pytest.mark.sweep
def test_an_overwriting_save_never_mixes_ranks(servers, survived):
    """What PyTorch's distributed checkpoint does: rank 1 dies before it opens its file of the second save, and `load`
    succeeds with new rows of rank 0 and old rows of rank 1. Here: step 1, all of it."""
    variant = config_of(world=2, layout="tp", victim=1)
    seen = counted(servers, [variant])[0]
    assert seen[1][0] == "create"
    config = {**variant, "kind": "kill-before", "at": 0, "name": "create"}
    swept(servers, [config], survived)
    assert servers.run([config])[0]["checked"] == {"step": 1, "wrong": []}


# -- the operations themselves, in this process ------------------------------------------------------------------------


def test_no_close_fails_a_save(tmp_path, monkeypatch):
    """The files are flushed by then. Without this, a close after the rename failed a save whose checkpoint was
    there."""
    real, failed = os.close, []

    def close(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor)
        if path.startswith(str(tmp_path)):
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")

    bench = fault_jobs.Bench()
    bench.set(1)
    with monkeypatch.context() as patch, bench.checkpointer(tmp_path / "run") as checkpoints:
        patch.setattr(os, "close", close)
        checkpoints.save(1)
    assert len({Path(path).name for path in failed}) >= 5, failed
    assert load_checkpoint(tmp_path / "run", bench.module, optimizer=bench.optimizer) == 1 and not bench.differs(1)


def test_folders_that_could_not_be_flushed_are_made_again(tmp_path, monkeypatch):
    """A folder of a run that was made, and whose entry is not on the disk, must not be taken for one that was
    flushed."""
    bench, flushed = fault_jobs.Bench(), []
    root = tmp_path / "runs" / "a"

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "flush_folder", fails)
        with pytest.raises(CheckpointError) as caught:
            bench.checkpointer(root)
    assert caught.value.slugs == ("write-failed",)
    real = disk.flush_folder
    monkeypatch.setattr(disk, "flush_folder", lambda path: (flushed.append(path), real(path)))
    bench.checkpointer(root).close()
    assert {tmp_path, root.parent} <= set(flushed)


# -- power loss --------------------------------------------------------------------------------------------------------


@pytest.fixture
def split_small_tensors(monkeypatch):
    monkeypatch.setattr(fault_jobs.local_tensors, "SPLIT_BYTES", 64)


@pytest.mark.parametrize("keep_last", [None, 1])
def test_power_may_fail_at_any_moment(tmp_path, keep_last, split_small_tensors):
    """Every prefix of a save's operations, with what was not flushed kept, lost, or kept in part."""
    bench, root = fault_jobs.Bench(), tmp_path / "run"
    bench.set(1)
    with bench.checkpointer(root, keep_last=keep_last) as checkpoints:
        checkpoints.save(1)
        before = crash_replay.read_tree(root)
        bench.set(2)
        with crash_replay.recorded(root) as log:
            checkpoints.save(2)
    tried, steps, wrong, seen = 0, Counter(), [], set()
    copy = tmp_path / "copy"
    for prefix, name, tree in crash_replay.outcomes(before, log, seed=20, tries=20):
        tried += 1
        if (key := crash_replay.key_of(tree)) in seen:
            continue
        seen.add(key)
        crash_replay.write_tree(copy, tree)
        try:
            step = load_checkpoint(copy, bench.module, optimizer=bench.optimizer)
            problem = bench.differs(step)
            steps[step] += 1
            for number, folder in folders.published(copy).items():
                load_checkpoint(folder, bench.module, optimizer=bench.optimizer)
                problem = problem or bench.differs(number)
            if prefix == len(log) and step != 2:
                problem = ["the save had ended"]
        except Exception as error:
            problem = [repr(error)[:300]]
        if problem:
            wrong.append((prefix, name, problem))
        shutil.rmtree(copy)
    text = f"{tried} prefixes ({len(seen)} different folders), seed 20: loaded as {dict(steps)}"
    print(text)
    assert not wrong, (text, wrong[:5])
    assert tried >= 500
    assert set(steps) == {1, 2}, text


def test_power_may_fail_in_the_first_save(tmp_path, split_small_tensors):
    """A save that has returned is on the disk, with the folders that lead to it; before that there may be none."""
    bench, base = fault_jobs.Bench(), tmp_path / "base"
    base.mkdir()
    bench.set(1)
    with crash_replay.recorded(base) as log, bench.checkpointer(base / "runs" / "a") as checkpoints:
        checkpoints.save(1)
    saved = next(n for n, step in enumerate(log) if step.kind == "entries" and step.names_latest)
    none = 0
    for number, (prefix, _, tree) in enumerate(crash_replay.outcomes({}, log, seed=21, tries=6)):
        copy = tmp_path / f"copy-{number}"
        crash_replay.write_tree(copy, tree)
        try:
            assert load_checkpoint(copy / "runs" / "a", bench.module, optimizer=bench.optimizer) == 1
            assert not bench.differs(1)
        except CheckpointError as error:
            assert error.slugs == ("no-checkpoint",), error
            assert prefix <= saved, "the save had come to `latest`, and is lost"
            none += 1
        shutil.rmtree(copy)
    assert none


# -- who may write -----------------------------------------------------------------------------------------------------


def test_a_folder_has_one_writer(tmp_path):
    bench, root = fault_jobs.Bench(), tmp_path / "run"
    with bench.checkpointer(root) as checkpoints:
        checkpoints.save(1)
        with pytest.raises(CheckpointError) as caught:
            bench.checkpointer(root)
        assert caught.value.slugs == ("folder-in-use",)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(1)
        assert caught.value.slugs == ("already-saved",)
        checkpoints.save(2)
    with bench.checkpointer(root) as checkpoints:
        assert checkpoints.resume() == 2
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2)
        assert caught.value.slugs == ("already-saved",)


def test_a_closed_folder_is_free_though_forks_live_on(tmp_path):
    """Workers of a data loader are forks: they keep the lock file open as long as they run."""
    checkpoints = fault_jobs.Bench().checkpointer(tmp_path)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        checkpoints.close()
        fault_jobs.Bench().checkpointer(tmp_path).close()
    finally:
        os.close(write_end)
        os.waitpid(pid, 0)
        os.close(read_end)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path / "file" / "run", torch.nn.Linear(2, 2))
    assert caught.value.slugs == ("not-a-folder",)
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ("open", "remove_file"),
        ("open", "write_file"),
        ("resume", "rename"),
        ("resume", "replace_file"),
    ],
)
def test_a_failing_disk_is_explained_outside_of_saves_too(tmp_path, monkeypatch, at, name):
    bench = fault_jobs.Bench()
    with bench.checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1)
        checkpoints.save(2)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if at == "open":
        monkeypatch.setattr(disk, name, fails)
        with pytest.raises(CheckpointError) as caught:
            bench.checkpointer(tmp_path)
    else:
        with bench.checkpointer(tmp_path) as checkpoints:
            monkeypatch.setattr(disk, name, fails)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.resume(1, set_aside=True)
    assert caught.value.slugs == ("write-failed",)


def test_files_of_others_stay(tmp_path):
    """Cleaning up removes what a save has left, and nothing else."""
    kept = ["notes.txt", ".hidden", "step-1", "step-00000007.old", ".step-00000007.aside-0123456789ab", "latest.bak"]
    gone = [".step-00000009.writing-0123456789ab", ".step-00000009.removing-0123456789ab"]
    for name in (*kept, *gone):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("b")
    with fault_jobs.Bench().checkpointer(tmp_path) as checkpoints:
        checkpoints.save(9)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {*kept, ".lock", "latest", "step-00000009"}


def test_all_operations_on_disk_are_swept():
    """Every function of `disk` is counted, and other files write through it only."""
    functions = {
        name
        for name, value in vars(disk).items()
        if callable(value) and getattr(value, "__module__", "") == disk.__name__
    }
    assert functions - {"reporting_errors", "_free", "begin_flush"} == set(fault_jobs.OPERATIONS)
    package = Path(folders.__file__).parents[1]
    for name in (
        "run/save",
        "run/node_files",
        "run/run_folder",
        "format/writer",
        "format/folders",
        "run/checkpointer",
        "run/snapshot",
    ):
        text = (package / f"{name}.py").read_text()
        for call in (
            "os.rename",
            "os.replace",
            "os.write",
            "os.fsync",
            "os.mkdir",
            "shutil.",
            ".write_text",
            ".write_bytes",
        ):
            assert call not in text, f"{name}.py calls {call}"


@pytest.mark.sweep
def test_three_hundred_faults_were_survived(survived):
    """By the sweeps above: run them all."""
    total = sum(survived.values())
    print(f"{total} injected faults, {total} survived: {dict(survived)}")
    assert total >= FEWEST_FAULTS, dict(survived)
