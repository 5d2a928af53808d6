"""The tools that need no model and no process group: inspect, verify, reshape, and conversion from and to Hugging
Face."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parallelize.base.boxes import volume
from parallelize.base.errors import CheckpointError, MeshError
from parallelize.base.layout import Chunk, packed
from parallelize.base.mesh import MeshSpec
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, check_tensors, read_manifest
from parallelize.checkpoint.format.reader import TensorFile
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from parallelize.checkpoint.tools.file_check import verify_checkpoint
from parallelize.checkpoint.tools.from_hub import from_hub
from parallelize.checkpoint.tools.reshape import TargetSharding, reshape_checkpoint, written_boxes
from parallelize.checkpoint.tools.to_hub import to_hub
from parallelize.cli import main
from tests.checkpoint import checkpoint_jobs as jobs
from tests.support.models import tiny_model

STEP = "step-00000002"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> folder of a run with a plan and one rank of tp; its full state is in `reference.safetensors`."""
    from tests.support.processes import Pool

    pool, root = Pool(1), tmp_path_factory.mktemp("saved")
    folders_of = {}
    for family in ("llama", "phi3"):
        folders_of[family] = root / family
        pool.run(jobs.save_source, family, {"tp": 1}, {}, str(folders_of[family]), timeout_s=120)
    pool.close()
    return folders_of


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of a checkpoint, which the test may damage."""
    shutil.copytree(saved["llama"] / STEP, tmp_path / "run" / STEP)
    return tmp_path / "run"


def state_of(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments, loaded by one process into a new model."""
    model = tiny_model(family, seed=5, num_hidden_layers=4, **jobs.OVERRIDES[family])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert load_checkpoint(folder, model, optimizer=optimizer) == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2
    state = {}
    for name, parameter in model.named_parameters():
        state[f"model/{name}"] = parameter.detach()
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected)
    wrong = [n for n in expected if actual[n].dtype != expected[n].dtype or not torch.equal(actual[n], expected[n])]
    assert not wrong


def rewritten(folder: Path, **changes: Any) -> Manifest:
    """Change the manifest of a folder."""
    manifest = replace(read_manifest(folder), **changes)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def start_of(path: Path, tensor: str) -> int:
    with TensorFile(path.parent, path.name) as file:
        return file.entry(tensor).start


def rows(problem: Any) -> dict[str, str]:
    return dict(problem.rows)


# -- reshape -----------------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=9)
@pytest.mark.parametrize(
    ("mesh", "zero"),
    [("pp=2,tp=2", None), ("dp=4", 3), ("tp=4", None), ("pp=2,dp=2,tp=2", 1), ("dp_replicate=2,dp_shard=2,tp=2", 2)],
)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_another_mesh_has_the_same_state_and_is_reshaped_back_to_the_same_bytes(saved, family, mesh, zero, tmp_path):
    folder = reshape_checkpoint(saved[family], tmp_path / "there", mesh, zero=zero)
    spec, manifest = MeshSpec.parse(mesh), read_manifest(folder)
    assert folder == tmp_path / "there" / STEP
    assert (tmp_path / "there" / "latest").read_text() == STEP + "\n"
    assert len(manifest.files) == spec.world_size == manifest.about["world_size"]
    assert manifest.about["mesh"] == [list(axis) for axis in spec.axes]
    assert manifest.about["reshaped_from"] == [["tp", 1]]
    assert manifest.about["zero"] == zero
    assert verify_checkpoint(folder) == []
    assert_equal(state_of(family, folder), load_file(saved[family] / "reference.safetensors"))
    back = reshape_checkpoint(tmp_path / "there", tmp_path / "back", "tp=1", zero=0)
    assert read_manifest(back).files == read_manifest(saved[family] / STEP).files
    assert read_manifest(back).tensors == read_manifest(saved[family] / STEP).tensors


@pytest.mark.variants(every=2)
@pytest.mark.processes
@pytest.mark.parametrize(("axes", "zero"), [({"tp": 2}, None), ({"pp": 2}, None), ({"dp": 2}, 3), ({"dp": 2}, 1)])
def test_tensors_are_sharded_as_a_run_on_that_mesh_saves_them(saved, two_processes, axes, zero, tmp_path):
    options = {} if zero is None else {"zero": zero}
    two_processes.run(jobs.save_source, "phi3", axes, options, str(tmp_path / "run"), timeout_s=120)
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
    folder = reshape_checkpoint(saved["phi3"], tmp_path / "reshaped", mesh, zero=zero)
    slices = [
        {
            n: sorted((p.file, p.box) for p in tensor.slices)
            for n, tensor in read_manifest(path).tensors.items()
            if n[:5] != "state"
        }
        for path in (tmp_path / "run" / STEP, folder)
    ]
    assert slices[0] == slices[1]


@pytest.mark.parametrize(
    ("shape", "sharding"),
    [
        ((7, 5), TargetSharding(1, packed((7, 5), 0, 3, [Chunk(7)]), "dp")),
        ((24, 5), TargetSharding(0, packed((24, 5), 0, 3, [Chunk(12, 6), Chunk(6, 1, True), Chunk(6, 3)]), "dp")),
        ((5, 9), TargetSharding(1, packed((5, 9), 1, 3, [Chunk(9, 3)]), "dp")),
        ((1,), TargetSharding(0, None, "dp")),
        ((), TargetSharding(1, None, "dp")),
        ((0, 4), TargetSharding(0, None, "dp")),
        ((4096, 1024), TargetSharding(1)),
        ((4096, 1024), TargetSharding(0, None, None, True)),
    ],
)
def test_every_element_has_one_owner_on_the_stage_it_belongs_to(shape, sharding):
    mesh = MeshSpec(pp=2, dp_replicate=2, dp=2, tp=3)
    owned = list(written_boxes("w", shape, 4, sharding, mesh))
    file = SavedTensor("w", "F32", shape, tuple(_slice(rank, box) for rank, box in owned))
    check_tensors([file], "here")
    ranks = {rank for rank, _ in owned}
    assert {mesh.coordinates(rank)["pp"] for rank in ranks} <= {sharding.stage}
    assert not sharding.first_rank_only or ranks == {0}
    large = (
        volume(((0, 4096), (0, 1024))) == volume(tuple((0, size) for size in shape)) and not sharding.first_rank_only
    )
    assert not large or len(ranks) == 4  # 16 MB on 12 ranks: in parts of 4 MB


def _slice(rank: int, box: Any) -> Any:
    from parallelize.checkpoint.format.saved_slices import SavedSlice

    return SavedSlice(f"rank-{rank:05d}.safetensors", "w", box)


def test_rows_are_sharded_as_they_are_stored_with_padding():
    """Two chunks of 3 rows: rank 0 of tp stores 4 rows; rank 1 stores 2, padded to 4, of which the first rank of dp has
    2."""
    layout = packed((6, 2), 0, 2, [Chunk(3), Chunk(3)])
    owned = list(written_boxes("w", (6, 2), 4, TargetSharding(0, layout, "dp"), MeshSpec(dp=2, tp=2)))
    assert [(rank, box[0]) for rank, box in owned] == [(0, (0, 2)), (2, (3, 5)), (1, (2, 3)), (1, (5, 6))]


@pytest.mark.parametrize(("zero", "files"), [(0, 1), (1, 2), (3, 2)])
def test_float32_copies_of_narrow_weights_are_sharded_as_moments_are(copied, tmp_path, zero, files):
    old = read_manifest(copied / STEP)
    name = "model/model.norm.weight"
    narrow = replace(old.tensors[name], about={"compute": "BF16"})
    rewritten(copied / STEP, tensors={**old.tensors, name: narrow})
    manifest = read_manifest(reshape_checkpoint(copied, tmp_path / "a", "dp=2", zero=zero))
    assert len(manifest.tensors[name].slices) == files
    assert len(manifest.tensors["model/lm_head.weight"].slices) == (2 if zero == 3 else 1)


def test_tied_weights_and_units_go_to_balanced_stages(saved, tmp_path):
    manifest = read_manifest(reshape_checkpoint(saved["llama"], tmp_path / "a", "pp=3"))
    stage = {n: {p.file for p in tensor.slices} for n, tensor in manifest.tensors.items() if n.startswith("model/")}
    assert all(len(files) == 1 for files in stage.values())
    assert stage["model/model.embed_tokens.weight"] == {"rank-00000.safetensors"}
    assert stage["model/lm_head.weight"] == stage["model/model.norm.weight"] == {"rank-00002.safetensors"}
    order = [sorted(stage[f"model/model.layers.{n}.mlp.up_proj.weight"])[0] for n in range(4)]
    assert order == sorted(order)
    sizes = [info.num_bytes for info in manifest.files.values()]
    assert max(sizes) < 2 * min(sizes)


def test_generators_are_kept_for_the_same_mesh_and_only_those_of_the_first_rank_for_another(copied, tmp_path):
    old = read_manifest(copied / STEP)
    own = next(name for name in old.tensors if name.startswith("state/generators.0") and "torch" in name)
    twin = own.replace("generators.0", "generators.1")
    second = json.loads(json.dumps(old.state["generators"]["0"]).replace("generators.0", "generators.1"))
    tensors = {**old.tensors, **{n.replace("rs.0", "rs.1"): replace(tensor, name=n.replace("rs.0", "rs.1"))
               for n, tensor in old.tensors.items() if "generators.0" in n}}  # fmt: skip
    state = {**old.state, "generators": {"0": old.state["generators"]["0"], "1": second}}
    rewritten(copied / STEP, tensors=tensors, state=state)
    same = read_manifest(reshape_checkpoint(copied, tmp_path / "same", "tp=1"))
    assert list(same.state["generators"]) == ["0", "1"] and {own, twin} <= set(same.tensors)
    other = read_manifest(reshape_checkpoint(copied, tmp_path / "other", "tp=2"))
    assert list(other.state["generators"]) == ["0"]
    assert own in other.tensors and twin not in other.tensors


@pytest.mark.parametrize(
    ("mesh", "options", "error", "slug"),
    [
        ("pp=9", {}, CheckpointError, "too-many-stages"),
        ("tp=2", {"zero": 1}, MeshError, "no-data-axis"),
        ("dp=2", {"zero": 4}, CheckpointError, "bad-zero-stage"),
        ("data=2", {}, MeshError, "unknown-axis"),
        ("dp2", {}, MeshError, "bad-mesh"),
        ("dp=2", {"step": 7}, CheckpointError, "no-checkpoint"),
    ],
)
def test_what_cannot_be_reshaped_is_refused_and_leaves_nothing(saved, tmp_path, mesh, options, error, slug):
    with pytest.raises(error) as caught:
        reshape_checkpoint(saved["llama"], tmp_path / "there", mesh, **options)
    assert caught.value.slugs == (slug,)
    assert not list(tmp_path.iterdir())


def test_targets_in_the_source_and_published_steps_are_refused(copied, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    for source, target, slug in [
        (copied, copied / "tp2", "bad-target"),
        (copied / STEP, copied / STEP / "tp2", "bad-target"),
        (copied / STEP, copied / STEP, "bad-target"),
        (copied, copied, "already-saved"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            reshape_checkpoint(source, target, "tp=2")
        assert caught.value.slugs == (slug,)
    assert set(copied.rglob("*")) - set(before) <= {copied / ".lock"}
    assert all(path.stat().st_mtime_ns == before[path] for path in before if path.is_file())


def test_a_changed_bit_in_the_source_ends_it_and_leaves_nothing(copied, tmp_path):
    path = copied / STEP / "rank-00000.safetensors"
    flip(path, start_of(path, "optimizer/model.norm.weight/exp_avg"))
    (tmp_path / "old").mkdir()
    for target in (tmp_path / "new", tmp_path / "old"):
        with pytest.raises(CheckpointError) as caught:
            reshape_checkpoint(copied, target, "pp=2,tp=2")
        assert caught.value.slugs == ("corrupt-tensor",)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "old").iterdir()] == [".lock"]
    path = copied / STEP / "rank-00000.safetensors"
    flip(path, start_of(path, "model/lm_head.weight"))
    with pytest.raises(CheckpointError):
        to_hub(copied, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "run"]


# -- Hugging Face ------------------------------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: tiny_model("llama"),
    "llama-tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "gpt2": lambda: tiny_model("gpt2"),
    "phi3": lambda: tiny_model("phi3"),
    "mixtral": lambda: mixtral(),
}


TIES = {
    "llama-tied": [["model.embed_tokens.weight", "lm_head.weight"]],
    "gpt2": [["transformer.wte.weight", "lm_head.weight"]],
}


def mixtral() -> Any:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2, max_position_embeddings=64, **sizes
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("mesh", [None, "pp=2,dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_from_and_to_hugging_face_gives_the_folder_that_transformers_writes(name, mesh, tmp_path):
    torch.manual_seed(3)
    model = MODELS[name]()
    for max_size in ("5GB", "40KB"):
        model.save_pretrained(tmp_path / f"ref-{max_size}", max_shard_size=max_size)
        folder = from_hub(tmp_path / f"ref-{max_size}", tmp_path / f"run-{max_size}", mesh=mesh)
        assert verify_checkpoint(folder) == []
        ties = [tensor.about["names"] for tensor in read_manifest(folder).tensors.values() if "names" in tensor.about]
        assert ties == TIES.get(name, [])
        to_hub(tmp_path / f"run-{max_size}", tmp_path / f"hf-{max_size}", max_shard_size=max_size)
        actual, expected = (read_folder(tmp_path / f"{tensor}-{max_size}") for tensor in ("hf", "ref"))
        if name == "mixtral" and max_size == "40KB":  # transformers writes the chunks of one tensor to one file
            actual, expected = as_one_file(actual), as_one_file(expected)
        assert list(actual) == list(expected)
        for file in expected:
            if file.endswith(".json"):
                assert actual[file] == expected[file], file
            else:
                assert_equal(actual[file], expected[file])
    torch.manual_seed(4)
    other = MODELS[name]()
    load_checkpoint(tmp_path / "run-5GB", other)
    assert_equal(other.state_dict(), model.state_dict())
    again = type(model).from_pretrained(tmp_path / "hf-40KB")
    assert_equal(again.state_dict(), model.state_dict())


def read_folder(folder: Path) -> dict[str, Any]:
    return {
        path.name: path.read_text() if path.suffix == ".json" else load_file(path) for path in sorted(folder.iterdir())
    }


def as_one_file(folder: dict[str, Any]) -> dict[str, Any]:
    """The tensors of all files together, without the index."""
    texts = {name: content for name, content in folder.items() if name.endswith("config.json")}
    tensors = [content for name, content in folder.items() if name.endswith(".safetensors")]
    assert len(tensors) > 2
    return texts | {"weights": {name: value for content in tensors for name, value in content.items()}}


def test_a_run_goes_on_from_pretrained_weights(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "hf")
    from_hub(tmp_path / "hf", tmp_path / "run", mesh="dp=2", step=3)
    other = tiny_model("llama", seed=1)
    optimizer = torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path / "run", other, optimizer=optimizer) as checkpoints:
        assert checkpoints.resume(strict=False) == 3
        assert_equal(other.state_dict(), model.state_dict())
        assert not optimizer.state
        checkpoints.save(4)
    assert list(folders.published(tmp_path / "run")) == [3, 4]


def test_the_default_dtype_is_the_compute_dtype(copied, tmp_path):
    old = read_manifest(copied / STEP)
    tensors = {
        n: replace(tensor, about={**tensor.about, "compute": "BF16"})
        for n, tensor in old.tensors.items()
        if n[:5] == "model"
    }
    rewritten(copied / STEP, tensors={**old.tensors, **tensors})
    for dtype, expected in [(None, torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)]:
        folder = to_hub(copied, tmp_path / str(dtype), dtype=dtype)
        state = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        assert {tensor.dtype for tensor in state.values()} == {expected}
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
        source = load_file(copied / STEP / "rank-00000.safetensors")
        assert all(torch.equal(tensor, source[f"model/{name}"].to(expected)) for name, tensor in state.items())
    with pytest.raises(CheckpointError) as caught:
        to_hub(copied, tmp_path / "no", dtype="float61")
    assert caught.value.slugs == ("bad-dtype",) and "float16" in str(caught.value)


def test_files_of_a_tokenizer_are_copied_and_weights_are_not(copied, tmp_path):
    extras = tmp_path / "given"
    extras.mkdir()
    for name in ("tokenizer.json", "merges.txt", "config.json", "a.bin", "b.pt", "c.gguf", "model.safetensors"):
        (extras / name).write_text(name)
    folder = to_hub(copied, tmp_path / "hf", carry=extras)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_links_out_of_the_folder_are_not_published(copied, tmp_path):
    """Nor copied after hours of writing weights: they are refused first."""
    (tmp_path / "secret").write_text("secret")
    extras = tmp_path / "given"
    extras.mkdir()
    (extras / "merges.txt").write_bytes(b"\0binary")
    (extras / "vocab.txt").symlink_to(extras / "merges.txt")
    folder = to_hub(copied, tmp_path / "hf", carry=extras)
    assert (folder / "vocab.txt").read_bytes() == b"\0binary" and not (folder / "vocab.txt").is_symlink()
    (extras / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"unsafe-path: links to .*secret, outside its folder"):
        to_hub(copied, tmp_path / "other", carry=extras)
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").iterdir())


def test_names_do_not_control_the_terminal(tmp_path, capsys):
    name = "a\x1b]0;title\x07\u202e"
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["\x1b[2J"]}))
    assert main(["checkpoint", "inspect", str(tmp_path), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]0;title\\x07\\u202e" in shown and "\\x1b[2J" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_a_custom_module_keeps_its_names_and_nothing_is_imported_for_it(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.append(torch.nn.Linear(3, 4))
    model[2].weight = model[0].weight
    with Checkpointer(tmp_path / "run", model) as checkpoints:
        checkpoints.save(1)
    old = read_manifest(tmp_path / "run" / "step-00000001")
    evil = {"class": "os.system", "config": "{}", "generation_config": None}
    rewritten(tmp_path / "run" / "step-00000001", about={**old.about, "model": evil})
    written = load_file(to_hub(tmp_path / "run", tmp_path / "hf", dtype="float16") / "model.safetensors")
    names = [name for name in model.state_dict() if name != "2.weight"]
    assert sorted(written) == sorted(names)
    assert written["1.num_batches_tracked"].dtype == torch.int64 and written["0.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"dtype": "float16"}
    (tmp_path / "hf" / "config.json").unlink()
    back = read_manifest(from_hub(tmp_path / "hf", tmp_path / "back"))
    assert sorted(back.tensors) == sorted(f"model/{name}" for name in names)


def test_a_class_that_transformers_lacks_and_a_config_of_another_model_are_refused(copied, tmp_path, monkeypatch):
    old = read_manifest(copied / STEP)
    model = old.about["model"]
    config = json.dumps({**json.loads(model["config"]), "num_hidden_layers": 5})
    for changes, slug in [
        ({"class": "transformers.models.x.NoSuchModel"}, "unbuildable-model"),
        ({"class": "transformers.AutoConfig"}, "unbuildable-model"),
        ({"config": '{"hidden_size": "wide"}'}, "unbuildable-model"),
        ({"config": config}, "other-model"),
    ]:
        rewritten(copied / STEP, about={**old.about, "model": {**model, **changes}})
        with pytest.raises(CheckpointError) as caught:
            to_hub(copied, tmp_path / "hf")
        assert caught.value.slugs == (slug,)
    rewritten(copied / STEP, about=old.about)
    refuse = {}.__getitem__  # as a check of a config class that raises
    monkeypatch.setattr(transformers.LlamaConfig, "save_pretrained", lambda self, folder: refuse("a check"))
    with pytest.raises(CheckpointError) as caught:
        to_hub(copied, tmp_path / "hf")
    assert caught.value.slugs == ("unwritable-config",)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_generation_config_that_transformers_warns_of_is_copied(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "hf")
    text = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9}'
    (tmp_path / "hf" / "generation_config.json").write_text(text)
    from_hub(tmp_path / "hf", tmp_path / "run")
    assert (to_hub(tmp_path / "run", tmp_path / "back") / "generation_config.json").read_text() == text


def test_tied_weights_that_differ_are_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError) as caught:
        from_hub(tmp_path / "hf", tmp_path / "run")
    assert caught.value.slugs == ("twins-differ",)
    assert not (tmp_path / "run").exists()


# -- verify ------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_reported_with_file_and_tensor_and_the_rest_is_checked(saved, tmp_path):
    folder = reshape_checkpoint(saved["llama"], tmp_path / "run", "tp=2")
    assert verify_checkpoint(folder) == []
    manifest = read_manifest(folder)
    expected = set()
    for name in ("model/lm_head.weight", "optimizer/model.norm.weight/exp_avg"):
        part = manifest.tensors[name].slices[-1]
        flip(folder / part.file, start_of(folder / part.file, part.key) + 5)
        expected.add((str(folder / part.file), part.key))
    problems = verify_checkpoint(tmp_path / "run")
    assert {(problem.where, rows(problem)["tensor"]) for problem in problems} == expected
    assert {problem.slug for problem in problems} == {"corrupt-tensor"}
    assert all(rows(problem)["expected"] != rows(problem)["found"] for problem in problems)


def test_verify_compares_files_with_the_manifest(saved, tmp_path):
    def problems_after(name: str, damage: Any) -> list[Any]:
        folder = tmp_path / name / STEP
        shutil.copytree(source, folder)
        damage(folder)
        return verify_checkpoint(folder)

    source = reshape_checkpoint(saved["llama"], tmp_path / "run", "dp=2", zero=3)
    first, second = "rank-00000.safetensors", "rank-00001.safetensors"

    def truncate(folder: Path) -> None:
        os.truncate(folder / first, 4000)
        flip(folder / second, (folder / second).stat().st_size - 1)

    problems = problems_after("cut", truncate)
    assert [problem.slug for problem in problems] == ["wrong-size", "corrupt-tensor"]
    assert rows(problems[0])["found"] == "4,000 bytes"
    assert [problem.slug for problem in problems_after("gone", lambda folder: (folder / second).unlink())] == [
        "missing-file"
    ]
    problems = problems_after("more", lambda folder: (folder / "notes.txt").write_text("x"))
    assert [(problem.slug, Path(problem.where).name) for problem in problems] == [("unlisted-file", "notes.txt")]
    problems = problems_after(
        "header", lambda folder: flip(folder / first, (folder / first).read_bytes().index(b'"pt"') + 1)
    )
    assert [problem.slug for problem in problems] == ["corrupt-header"]
    assert [
        problem.slug for problem in problems_after("manifest", lambda folder: flip(folder / "manifest.json", 300))
    ] == ["corrupt-manifest"]


def test_verify_compares_entries_with_slices(copied):
    old = read_manifest(copied / STEP)
    tensors = dict(old.tensors)
    norm = tensors.pop("model/model.norm.weight")
    rewritten(copied / STEP, tensors=tensors)
    (problem,) = verify_checkpoint(copied)
    assert problem.slug == "unlisted-tensor" and "model.norm.weight" in problem.what
    tensors["model/model.norm.weight"] = replace(norm, dtype="BF16")
    rewritten(copied / STEP, tensors=tensors)
    (problem,) = verify_checkpoint(copied)
    assert (
        problem.slug == "wrong-entry"
        and rows(problem)["expected"] == "BF16 [48]"
        and rows(problem)["found"] == "F32 [48]"
    )
    tensors["model/more"] = replace(norm, name="model/more", slices=(replace(norm.slices[0], key="model/more"),))
    rewritten(copied / STEP, tensors={**old.tensors, "model/more": tensors["model/more"]})
    (problem,) = verify_checkpoint(copied)
    assert problem.slug == "missing-tensor" and rows(problem)["tensor"] == "model/more"


def test_verify_of_hugging_face_folders_checks_what_can_be_checked(copied, tmp_path, capsys):
    folder = to_hub(copied, tmp_path / "hf", max_shard_size="60KB")
    assert verify_checkpoint(folder) == []
    shard = sorted(folder.glob("*.safetensors"))[1]
    flip(shard, shard.stat().st_size - 3)
    (problem,) = verify_checkpoint(folder)
    assert problem.slug == "corrupt-tensor" and problem.where == str(shard)
    tiny_model("llama").save_pretrained(tmp_path / "plain", max_shard_size="60KB")
    assert main(["checkpoint", "verify", str(tmp_path / "plain")]) == 0
    assert "without hashes" in capsys.readouterr().out
    index = tmp_path / "plain" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    names = sorted(set(listed["weight_map"].values()))
    assert len(names) > 2
    listed["weight_map"]["lm_head.weight"] = next(
        file for file in names if file != listed["weight_map"]["lm_head.weight"]
    )
    index.write_text(json.dumps(listed))
    (problem,) = verify_checkpoint(tmp_path / "plain")
    assert problem.slug == "bad-index" and rows(problem)["tensor"] == "lm_head.weight"
    os.truncate(tmp_path / "plain" / names[1], 9000)
    assert "truncated-file" in [file.slug for file in verify_checkpoint(tmp_path / "plain")]


# -- the command line --------------------------------------------------------------------------------------------------


def run(*arguments: Any, **environment: str) -> subprocess.CompletedProcess:
    code = (
        "import sys\nfrom parallelize.cli import main\nstatus = main(sys.argv[1:])\n"
        "print('torch' if 'torch' in sys.modules else 'no torch', file=sys.stderr)\nsys.exit(status)"
    )
    command = [sys.executable, "-c", code, "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


@pytest.mark.processes
def test_inspect_is_stable_and_needs_no_torch(saved):
    first, second = (run("inspect", saved["llama"], "--json", PYTHONHASHSEED=seed) for seed in "12")
    assert first.returncode == 0 and first.stderr == "no torch\n"
    assert first.stdout == second.stdout
    info = json.loads(first.stdout)
    assert "tensors" not in info
    assert (info["step"], info["mesh"], info["world_size"]) == (2, [["tp", 1]], 1)
    assert info["plan"]["name"] == "llama"
    reference = load_file(saved["llama"] / "reference.safetensors")
    weights = sum(value.numel() for name, value in reference.items() if name.startswith("model/"))
    assert info["holds"]["weights"] == {
        "tensors": 55,
        "elements": weights,
        "bytes": 4 * weights,
        "dtypes": {"F32": 4 * weights},
    }
    assert info["holds"]["optimizer"]["elements"] == 2 * weights
    group = info["optimizers"]["optimizer"]["groups"][0]
    assert group["parameters"] == 55 and group["options"]["lr"] == 1e-2 and group["options"]["betas"] == [0.9, 0.999]
    assert list(info["files"]) == ["rank-00000.safetensors"]


def test_inspect_prints_what_matters(saved, tmp_path, capsys):
    shutil.copytree(saved["llama"] / STEP, tmp_path / "run" / STEP)
    reshape_checkpoint(tmp_path / "run", tmp_path / "run2", "dp=2,tp=2", zero=1)
    shutil.copytree(tmp_path / "run2" / STEP, tmp_path / "run2" / "step-00000001")
    assert main(["checkpoint", "inspect", str(tmp_path / "run2"), "--tensors"]) == 0
    text = capsys.readouterr().out
    reference = load_file(saved["llama"] / "reference.safetensors")
    weights = sum(value.numel() for name, value in reference.items() if name.startswith("model/"))
    for expected in (
        "training checkpoint of step 2", f"LlamaForCausalLM, {weights:,} elements in 55 tensors",
        "dp=2, tp=2 (4 ranks), ZeRO 1", "tp=1 (1 rank), reshaped", "generators of 1 rank\n",
        "other steps  1", "AdamW", "lr 0.01", "rank-00003.safetensors", "model/lm_head.weight", "[67, 48]", "2 slices",
    ):  # fmt: skip
        assert expected in text, (expected, text)


@pytest.mark.processes
def test_commands_say_what_they_did_and_fail_with_status_2(saved, tmp_path):
    run_folder, there, hf = saved["phi3"], tmp_path / "there", tmp_path / "hf"
    verified = run("verify", run_folder)
    assert (
        verified.returncode == 0 and verified.stderr == "no torch\n" and "bytes match their hashes" in verified.stdout
    )
    assert main(["checkpoint", "reshape", str(run_folder), str(there), "--mesh", "pp=2,tp=2"]) == 0
    assert main(["checkpoint", "to-hf", str(there), str(hf), "--max-shard-size", "50KB"]) == 0
    assert main(["checkpoint", "from-hf", str(hf), str(tmp_path / "back"), "--mesh", "dp=2", "--step", "5"]) == 0
    assert [path.name for path in tmp_path.glob("back/step-*")] == ["step-00000005"]
    flip(there / STEP / "rank-00002.safetensors", (there / STEP / "rank-00002.safetensors").stat().st_size - 1)
    failed = run("verify", there)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "rank-00002.safetensors: corrupt-tensor" in failed.stderr


def test_mistakes_are_one_message_and_status_2(copied, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for arguments, slug in [
        (["inspect", str(tmp_path / "nothing")], "no-checkpoint"),
        (["verify", str(copied), "--step", "9"], "no-checkpoint"),
        (["reshape", str(copied), str(tmp_path / "a"), "--mesh", "nonsense"], "bad-mesh"),
        (["to-hf", str(copied), str(tmp_path / "full")], "folder-not-empty"),
        (["to-hf", str(copied), str(tmp_path / "a"), "--max-shard-size", "big"], "bad-size"),
        (["from-hf", str(tmp_path / "full"), str(tmp_path / "a")], "no-weights"),
        (["from-hf", str(tmp_path / "full"), str(tmp_path / "a"), "--step", "-1"], "bad-step"),
    ]:
        assert main(["checkpoint", *arguments]) == 2
        assert slug in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


# -- memory ------------------------------------------------------------------------------------------------------------

TENSOR = 8 << 20
MEASURE = """
import re, sys
from pathlib import Path
import torch, transformers
from parallelize.checkpoint.tools.from_hub import from_hub
from parallelize.checkpoint.tools.to_hub import to_hub
from parallelize.checkpoint.tools.reshape import reshape_checkpoint

def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

small, large, kind, out = sys.argv[1:]
def work(source, target):
    if kind == "reshape":
        reshape_checkpoint(source, target, "pp=2,dp=2,tp=2", zero=3)
    elif kind == "to":
        to_hub(source, target, dtype="bfloat16")
    else:
        from_hub(source, target, mesh="dp=2")
work(small, out + "/small")
Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
before = memory("VmRSS")
work(large, out + "/large")
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    """Checkpoints of sixteen tensors, small and of 8 MB each; the same in Hugging Face's layout."""
    root = tmp_path_factory.mktemp("sixteen")
    for name, width in (("small", 4), ("large", 2048)):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width // 2, bias=False) for _ in range(16)))
        with Checkpointer(root / name, model) as checkpoints:
            checkpoints.save(0)
        folder = root / name / "step-00000000"
        old = read_manifest(folder)
        about = {"cut": [1, [[width, None, False]]]}  # columns: the layout that needs most memory
        rewritten(
            folder,
            tensors={n: replace(tensor, about=about if n[:5] == "model" else {}) for n, tensor in old.tensors.items()},
        )
        to_hub(root / name, root / f"{name}-hf")
    return root


EXPERTS, HIDDEN = 16, 192
LAYER_OF_EXPERTS = EXPERTS * 3 * 2 * HIDDEN * HIDDEN * 4  # bytes: gate, up and down of twice the hidden size


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Folders of a Mixtral of six layers, small and with wide experts, one tensor for each; checkpoints of the same."""
    root = tmp_path_factory.mktemp("mixtures")
    for name, hidden in (("small", 8), ("large", HIDDEN)):
        sizes = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_local_experts=EXPERTS, num_hidden_layers=6)
        config = transformers.MixtralConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes)
        transformers.MixtralForCausalLM(config).save_pretrained(root / f"{name}-hf")
        from_hub(root / f"{name}-hf", root / name, mesh="dp=2")
    return root


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["reshape", "to", "from"])
def test_memory_is_within_one_layer_of_experts(mixtures, kind, tmp_path):
    extra, written = memory_of(mixtures, kind, tmp_path)
    assert extra <= LAYER_OF_EXPERTS, extra / LAYER_OF_EXPERTS
    assert written >= 6 * LAYER_OF_EXPERTS / 2  # the half: in bfloat16


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["reshape", "to", "from"])
def test_memory_is_about_one_tensor_whatever_the_checkpoint(sixteen, kind, tmp_path):
    extra, written = memory_of(sixteen, kind, tmp_path)
    assert TENSOR / 4 < extra < 3 * TENSOR, extra / TENSOR
    assert written >= 8 * TENSOR


def memory_of(folders, kind, out):
    """(bytes of memory beyond those of a small checkpoint, bytes written) of a tool, run in a process of its own."""
    names = ("small-hf", "large-hf") if kind == "from" else ("small", "large")
    sources = [str(folders / name) for name in names]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, *sources, kind, str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return int(result.stdout), sum(path.stat().st_size for path in (out / "large").rglob("*.safetensors"))
