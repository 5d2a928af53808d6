"""Invalid checkpoint files: each is refused with its slug, and the message names the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, CheckpointError, load_checkpoint, load_pretrained
from parallelize.base.files.digests import BLOCK_BYTES, KEY, digest_of
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.tools.file_check import verify_checkpoint
from parallelize.cli import main

STEP = "step-00000007"
VECTOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SECOND = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run with one checkpoint of one layer."""
    root = tmp_path_factory.mktemp("refusals") / "run"
    with Checkpointer(root, nn.Linear(4, 3)) as checkpoints:
        checkpoints.save(7)
    return root


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of that run, which the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def failing(*_: object) -> int:
    raise OSError(5, "Input/output error")


# -- headers of safetensors files --------------------------------------------------------------------------------------


def packed(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def hashed(digests: Any, block_bytes: int = BLOCK_BYTES) -> bytes:
    """A file of one tensor with these digests."""
    record = json.dumps({"block_bytes": block_bytes, "digests": digests})
    return packed({"__metadata__": {KEY: record}, "weight": VECTOR}, bytes(8))


HEADERS: dict[str, tuple[bytes, str]] = {
    "longer than its file": (struct.pack("<Q", 500) + b"{}", "the header should have 500 bytes, and the file has 10"),
    "with NUL bytes": (packed(b"{\0}"), "NUL"),
    "a list": (packed([]), "not a JSON object"),
    "a number as metadata": (packed({"__metadata__": {"step": 3}}), "__metadata__ is not a map"),
    "no shape": (packed({"weight": {"dtype": "F32"}}), "'weight' needs dtype, shape and data_offsets"),
    "unknown dtype": (packed({"weight": {**VECTOR, "dtype": "F33"}}, bytes(8)), "'weight' has the dtype 'F33'"),
    "negative shape": (packed({"weight": {**VECTOR, "shape": [-2]}}, bytes(8)), "'weight' has an invalid shape"),
    "offsets too far apart": (packed({"weight": {**VECTOR, "data_offsets": [0, 9]}}, bytes(9)), "which are 9 bytes"),
    "overlap": (packed({"weight": VECTOR, "bias": VECTOR}, bytes(8)), "overlaps another"),
    "gap": (packed({"weight": SECOND}, bytes(16)), "'weight' does not begin where the one before ends"),
    "bytes left over": (packed({"weight": VECTOR}, bytes(20)), "and its header describes"),
    "blocks of another size": (hashed({"weight": "0" * 32}, 512), f"{KEY} is not in the format of this version"),
    "digests of another tensor": (hashed({"bias": "0" * 32}), f"{KEY} does not list the blocks"),
    "a digest too short": (hashed({"weight": "0" * 31}), f"{KEY} does not list the blocks"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_invalid_headers_are_refused(kind, tmp_path):
    content, expected = HEADERS[kind]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path)
    assert caught.value.slugs == ("bad-header",)
    assert expected in str(caught.value) and str(tmp_path / "model.safetensors") in str(caught.value)


def test_a_valid_header_is_read(tmp_path):
    """The control of the tests above."""
    layer = nn.Linear(2, 1, bias=False)
    header = {"weight": {**VECTOR, "shape": [1, 2]}}
    (tmp_path / "model.safetensors").write_bytes(packed(header, struct.pack("<2f", 3.0, 4.0)))
    load_pretrained(layer, tmp_path)
    assert layer.weight.tolist() == [[3.0, 4.0]]


# -- manifests ---------------------------------------------------------------------------------------------------------


def sign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and update its digest."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())["manifest"]
    change(document)
    body = json.dumps(document).encode()
    path.write_bytes(b'{"digest":"' + digest_of(body).encode() + b'","manifest":\n' + body + b"}\n")


def refusal(root: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(root, nn.Linear(4, 3))
    return caught.value


def weight_of(document: dict[str, Any]) -> list[Any]:
    """[dtype, shape, slices, about]; a slice is [file, name in it, rows, columns]."""
    return document["tensors"]["model/weight"]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no tensors": (lambda document: document.pop("tensors"), "KeyError 'tensors'"),
    "unknown dtype": (lambda document: weight_of(document).__setitem__(0, "F33"), "tensor model/weight"),
    "negative size": (lambda document: weight_of(document).__setitem__(1, [-3, 4]), "-3 is not a size"),
    "file that is not listed": (lambda document: weight_of(document)[2][0].__setitem__(0, 9), "IndexError"),
    "state a list": (lambda document: document.update(state=[]), "about or state"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_with_invalid_content(kind, copied):
    change, expected = MANIFESTS[kind]
    sign(copied / STEP, change)
    error = refusal(copied)
    assert error.slugs == ("bad-manifest",)
    assert expected in str(error) and str(copied / STEP / "manifest.json") in str(error)


def test_a_format_that_is_newer(copied):
    sign(copied / STEP, lambda document: document.update(version=3))
    error = refusal(copied)
    assert error.slugs == ("newer-format",)
    assert "version 3" in str(error) and "newer version of parallelize" in str(error)


def test_a_manifest_of_another_format(copied):
    sign(copied / STEP, lambda document: document.update(format="other"))
    error = refusal(copied)
    assert error.slugs == ("not-a-checkpoint",)
    assert "parallelize-checkpoint" in str(error) and str(copied / STEP / "manifest.json") in str(error)


def test_the_newest_checkpoint_has_lost_its_manifest(copied):
    with Checkpointer(copied, nn.Linear(4, 3)) as checkpoints:
        checkpoints.save(8)
    (copied / "step-00000008" / "manifest.json").unlink()
    error = refusal(copied)
    assert error.slugs == ("not-a-checkpoint",)
    assert "latest names step-00000008, which no longer has a manifest" in str(error)
    assert load_checkpoint(copied, nn.Linear(4, 3), step=7) == 7


def test_a_folder_without_a_manifest(tmp_path):
    """As a rank may see it on a slow network file system, when another rank has resolved the folder."""
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert caught.value.slugs == ("not-a-checkpoint",) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([[[0, 2], [0, 4]]], "model/weight of [3, 4]: slices of 8 elements for 12"),
        ([[[0, 2], [0, 4]], [[1, 2], [0, 4]]], "slices of 12 elements for 12; "),
        ([[[0, 4], [0, 3]]], "slices of 12 elements for 12"),
    ],
    ids=["too few", "overlap", "outside"],
)
def test_slices_that_do_not_cover_the_tensor(boxes, expected, copied):
    def replace_slices(document: dict[str, Any]) -> None:
        row = weight_of(document)
        row[2] = [[*row[2][0][:2], *box] for box in boxes]

    sign(copied / STEP, replace_slices)
    error = refusal(copied)
    assert error.slugs == ("not-covered",)
    assert expected in str(error) and ("overlap" in str(error)) == (len(boxes) > 1)


# -- small files -------------------------------------------------------------------------------------------------------


def test_text_with_nul_bytes(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"hidden_size": 3\0}')
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path)
    assert caught.value.slugs == ("bad-text",)
    assert str(tmp_path / "config.json") in str(caught.value) and "NUL" in str(caught.value)


def test_a_config_of_more_than_16_mib(tmp_path):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", (16 << 20) + 1)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path)
    assert caught.value.slugs == ("oversized-file",)
    assert "16777217 bytes, more than the 16777216" in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


# -- files that cannot be read -----------------------------------------------------------------------------------------


def test_a_link_to_itself(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path)
    assert caught.value.slugs == ("unreadable-file",)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_a_disk_that_fails_while_a_tensor_is_loaded(copied, monkeypatch):
    monkeypatch.setattr(os, "preadv", failing)
    error = refusal(copied)
    assert error.slugs == ("unreadable-file",)
    assert "rank-00000.safetensors" in str(error) and "cannot be read: Input/output error" in str(error)


def test_a_disk_that_fails_while_a_checkpoint_is_verified(copied, monkeypatch):
    monkeypatch.setattr(os, "preadv", failing)
    (problem,) = verify_checkpoint(copied)
    assert problem.slug == "unreadable-file"
    assert problem.where.endswith("rank-00000.safetensors") and "Input/output error" in problem.what


def test_a_pickle_is_read_only_where_that_is_allowed(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path)
    assert caught.value.slugs == ("pickle-only",)
    assert "pytorch_model.bin" in str(caught.value) and "allow_pickle=True" in str(caught.value)
    load_pretrained(nn.Linear(2, 2), tmp_path, allow_pickle=True)


@pytest.mark.parametrize(
    ("write", "expected"),
    [(lambda path: path.write_bytes(b"no pickle"), "cannot be read"), (lambda path: torch.save([1], path), "a list")],
    ids=["garbage", "a list"],
)
def test_a_pickle_without_tensors_by_name(write, expected, tmp_path):
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(nn.Linear(2, 2), tmp_path, allow_pickle=True)
    assert caught.value.slugs == ("unreadable-file",)
    assert expected in str(caught.value) and str(tmp_path / "pytorch_model.bin") in str(caught.value)


# -- many problems -----------------------------------------------------------------------------------------------------


def test_ten_missing_tensors_are_named_and_the_others_counted(copied):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(copied, nn.Sequential(*(nn.Linear(4, 3) for _ in range(12))))
    slugs = caught.value.slugs
    assert (slugs.count("missing-tensor"), slugs.count("unexpected-tensor")) == (10, 2)
    assert slugs[-1] == "more-problems" and "and 14 more" in str(caught.value)


def test_verify_shows_fifty_problems_and_counts_the_others(tmp_path, capsys):
    with Checkpointer(tmp_path, nn.ParameterList(torch.ones(2) for _ in range(60)), generators=False) as checkpoints:
        checkpoints.save(7)
    path = tmp_path / STEP / "rank-00000.safetensors"
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:data] + bytes(byte ^ 1 for byte in content[data:]))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    stderr = capsys.readouterr().err
    assert stderr.count(": corrupt-tensor: ") == 50
    assert f"{tmp_path / STEP}: more-problems: and 10 more" in stderr
