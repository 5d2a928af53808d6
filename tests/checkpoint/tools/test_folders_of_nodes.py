"""Checkpoints that nodes have saved in folders of their own, gathered offline from several folders or from one copy of
all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallelize import Checkpointer, CheckpointError
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.run import local_tensors
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from parallelize.checkpoint.tools.contents import inspect_checkpoint
from parallelize.checkpoint.tools.file_check import verify_checkpoint
from parallelize.checkpoint.tools.reshape import reshape_checkpoint
from parallelize.checkpoint.tools.to_hub import to_hub
from parallelize.cli import main
from tests.checkpoint.checkpoint_jobs import built, everything, small_model, train
from tests.support.threads import run_ranks

STEP = "step-00000002"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """(folders of two nodes with a rank each, full state of the run that they have saved)."""
    root = tmp_path_factory.mktemp("nodes")
    models = [small_model("llama") for _ in range(2)]

    def body(rank: int) -> dict[str, torch.Tensor]:
        parallel, optimizer = built("llama", {"tp": 2}, {}, model=models[rank])
        train(parallel, optimizer, 0, 2)
        with Checkpointer(root / str(rank), parallel, optimizer=optimizer, shared=False) as checkpoints:
            checkpoints.save(1)
            checkpoints.save(2)
        return everything(parallel, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_tensors, "SPLIT_BYTES", 256)
        state = run_ranks(2, body)[0]
    return [root / "0", root / "1"], state


@pytest.fixture
def copied(nodes, tmp_path):
    """Copies of the folders, which the test may change."""
    for number, folder in enumerate(nodes[0]):
        shutil.copytree(folder, tmp_path / f"node-{number}")
    return [tmp_path / "node-0", tmp_path / "node-1"]


def assert_weights(weights: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    assert {f"model/{name}" for name in weights} == {name for name in state if name.startswith("model/")}
    assert all(torch.equal(value, state[f"model/{name}"]) for name, value in weights.items())


@pytest.mark.sweep
def test_several_folders_are_reshaped_and_converted_as_one(nodes, tmp_path):
    folders, state = nodes
    for number, source in enumerate((folders, [folder / STEP for folder in folders])):
        folder = reshape_checkpoint(source, tmp_path / f"reshaped-{number}", "dp=2", zero=1)
        model = small_model("llama", seed=1)
        assert load_checkpoint(folder, model) == 2 and "nodes" not in read_manifest(folder).about
        assert_weights(dict(model.named_parameters()), state)
        assert verify_checkpoint(folder) == []
    assert_weights(load_file(to_hub(folders, tmp_path / "hf") / "model.safetensors"), state)


def test_one_folder_into_which_all_were_copied(copied, nodes, tmp_path):
    shutil.copytree(copied[1], copied[0], dirs_exist_ok=True)
    assert_weights(load_file(to_hub(copied[0], tmp_path / "hf") / "model.safetensors"), nodes[1])
    assert verify_checkpoint(copied[0]) == [] == verify_checkpoint(copied[0], 1)


@pytest.mark.sweep
def test_the_commands_take_several_folders(nodes, tmp_path, capsys):
    names = [str(folder) for folder in nodes[0]]
    assert main(["checkpoint", "inspect", *names]) == 0
    text = capsys.readouterr().out
    assert "node 0" in text and "node 1" in text and "absent" not in text
    assert main(["checkpoint", "inspect", names[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["absent_files"] == ["rank-00000.safetensors"]
    assert main(["checkpoint", "inspect", names[1]]) == 0
    assert "rank-00000.safetensors: in none of the folders" in capsys.readouterr().out
    assert main(["checkpoint", "verify", *names, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 2
    assert (
        main(["checkpoint", "reshape", *names, str(tmp_path / "to"), "--mesh", "tp=1", "--step", "1", "--quiet"]) == 0
    )
    assert (tmp_path / "to" / "step-00000001").is_dir()
    assert main(["checkpoint", "to-hf", *names, str(tmp_path / "hf"), "--quiet"]) == 0


def test_a_missing_node_is_named_by_every_tool(copied, tmp_path):
    for source in (copied[1], [copied[1], copied[1] / STEP]):
        for call in (
            lambda source=source: reshape_checkpoint(source, tmp_path / "to", "tp=1"),
            lambda source=source: to_hub(source, tmp_path / "hf"),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            (problem,) = caught.value.problems
            rows = dict(problem.rows)
            assert problem.slug == "missing-node-files" and rows["node"].startswith("node 0, host ")
            assert rows["files"] == "rank-00000.safetensors" and "model/model.embed_tokens.weight" in rows["tensors"]
    assert not (tmp_path / "to").exists() and not (tmp_path / "hf").exists()
    (problem,) = verify_checkpoint(copied[1])
    assert problem.slug == "missing-node-files"


def test_the_newest_step_of_any_folder_is_taken_and_must_be_complete(copied, tmp_path):
    shutil.rmtree(copied[1] / STEP)
    with pytest.raises(CheckpointError) as caught:
        reshape_checkpoint(copied, tmp_path / "to", "tp=1")
    assert caught.value.slugs == ("missing-node-files",)
    assert inspect_checkpoint(copied, 1)["absent_files"] == []
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(copied, 3)
    assert caught.value.slugs == ("no-checkpoint",)


def test_every_copy_of_a_file_is_verified(copied):
    shutil.copytree(copied[1], copied[0], dirs_exist_ok=True)
    path = copied[1] / STEP / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = verify_checkpoint(copied)
    assert problem.slug == "corrupt-tensor" and problem.where == str(path)


def test_folders_of_different_runs_are_refused(copied):
    folder = copied[1] / STEP
    manifest = read_manifest(folder)
    manifest.about["saved_at"] = "2000-01-01T00:00:00Z"
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(copied)
    assert caught.value.slugs == ("other-checkpoint",)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint([])
    assert caught.value.slugs == ("no-checkpoint",)


def test_a_target_inside_one_of_the_folders_is_refused(copied):
    for target in (copied[1] / "to", copied[0] / STEP / "to"):
        for call in (lambda t=target: reshape_checkpoint(copied, t, "tp=1"),):
            with pytest.raises(CheckpointError) as caught:
                call()
            assert caught.value.slugs == ("bad-target",)


def test_folders_listed_in_a_manifest_are_not_trusted(copied):
    folder: Path = copied[0] / STEP
    manifest = read_manifest(folder)
    manifest.about["nodes"] = [["host", ["0", -1, 10**30]], 7, "x", ["host"]]
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    assert inspect_checkpoint(folder)["absent_files"] == ["rank-00001.safetensors"]
