"""Nothing written before breaks: what `written_before/make.py` wrote at 61880bf is read, and bit for bit.

Imports public names only, as those files were written by: where a module stands in the package may change, what is on a disk may not.
"""  # noqa: E501

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from parallelize import (
    Checkpointer,
    build_mesh,
    full_state_dict,
    load_checkpoint,
    load_pretrained,
    parallelize_model,
    parallelize_module,
    rebuild,
)
from tests.checkpoint.written_before import subjects
from tests.checkpoint.written_before.subjects import CASES, STEPS, VALUES
from tests.support.run_files import settings_of
from tests.support.threads import run_ranks

HERE = Path(__file__).parent / "written_before"
ROOT = Path(__file__).parents[2]
SAME, ALONE = "same", "alone"
MESHES = [(name, number) for name, case in CASES.items() for number in (SAME, ALONE, *range(len(case.others)))]


def mesh_of(name, number):
    case = CASES[name]
    if number == SAME:
        return case.axes, case.options
    return ({"dp": 1}, {}) if number == ALONE else case.others[number]


def expected_of(name):
    return json.loads((HERE / "checkpoints" / name / "expected.json").read_text())


def copied(name, tmp_path):
    """A copy of a run's folder, because a `Checkpointer` locks it."""
    return shutil.copytree(HERE / "checkpoints" / name / "run", tmp_path / name)


def resumed(name, axes, options, root):
    """What each rank finds after it has loaded the checkpoint, and after one more step."""
    case, expected = CASES[name], expected_of(name)
    model = case.model()
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]
    saving = {key: value for key, value in case.saving.items() if key != "asynchronous"}

    def body(rank):
        objects = case.on(models[rank], axes, {**options, "dropout_seed": 9})  # the checkpoint has another
        with Checkpointer(root, objects.parallel, **objects.saved, **saving) as checkpoints:
            assert checkpoints.resume() == STEPS == expected["step"]
            values = checkpoints.values
        found = {"wrong": subjects.differences(objects, expected["tensors"]), "values": subjects.plain(values)}
        found |= {"position": subjects.position(objects), "streams": subjects.stream_digests(objects)}
        found["generators"] = subjects.generator_draws() if len(models) == 1 else None
        return found | {"next_loss": objects.step(), "next_samples": objects.taken}

    return run_ranks(len(models), body)


@pytest.mark.parametrize(("name", "number"), MESHES)
def test_a_checkpoint_is_read_on_every_mesh(name, number, tmp_path):
    axes, options = mesh_of(name, number)
    expected = expected_of(name)
    ranks, saved = resumed(name, axes, options, copied(name, tmp_path)), expected["ranks"]
    assert [rank["wrong"] for rank in ranks] == [[]] * len(ranks)
    for rank in ranks:
        assert rank["values"] == subjects.plain(VALUES)
        assert rank["position"] == expected["position"]
    if number == SAME:
        for rank, before in zip(ranks, saved, strict=True):
            for key in ("streams", "generators", "next_samples"):
                assert rank[key] == before[key], key
    assert global_batch(ranks) == global_batch(saved)
    # losses are of other hardware, other sums, and of weights in another dtype
    tolerance = 2e-2 if CASES[name].options.get("dtype") else 1e-5
    assert ranks[0]["next_loss"] == pytest.approx(float.fromhex(saved[0]["next_loss"]), rel=tolerance)


def global_batch(ranks):
    return sorted({sample for rank in ranks for sample in rank["next_samples"]})


@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_optimizer_and_scheduler_are_built_from_the_manifest_alone(axes, tmp_path):
    expected = expected_of("adamw")
    model = CASES["adamw"].model()
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **(axes or {"dp": 1})))
        built = rebuild(parallel, HERE / "checkpoints" / "adamw" / "run")
        objects = subjects.Objects(parallel, built.optimizers["optimizer"], built.schedulers["scheduler"])
        return built.step, subjects.differences(objects, expected["tensors"]), subjects.position(objects)

    for step, wrong, position in run_ranks(len(models), body):
        assert (step, wrong) == (STEPS, [])
        # a rebuilt optimizer may have its options in another order
        assert position["schedulers"] == expected["position"]["schedulers"]
        assert sorted(map(str, named_options(position))) == sorted(map(str, named_options(expected["position"])))


def named_options(position):
    ((_, groups),) = position["options"]["dict"]
    return [pair for group in groups["list"] for pair in group["dict"]]


# -- weights alone, Hub and adapter folders ---------------------------------------------------------------------------


def on_two_ranks(model, load):
    """The full weights of a model on tp=2 after `load`."""
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        load(planned)
        return full_state_dict(planned)

    return run_ranks(2, body)[0]


@pytest.mark.parametrize("kind", ["run", "step", "hub"])
def test_weights_alone(kind):
    folder, model = HERE / "checkpoints" / "adamw", CASES["adamw"].model()
    loads = {
        "run": lambda model: load_checkpoint(folder / "run", model),
        "step": lambda model: load_checkpoint(folder / "run" / f"step-{STEPS:08}", model),
        "hub": lambda model: load_pretrained(model, folder / "hub"),
    }
    expected = expected_of("adamw")["tensors"]
    assert subjects.different_weights(on_two_ranks(model, loads[kind]), expected) == []
    if kind == "hub":
        load_pretrained(model, folder / "hub")
        assert subjects.different_weights(model.state_dict(), expected) == []
        assert len(list((folder / "hub").glob("*.safetensors"))) > 1
        stock = type(model).from_pretrained(folder / "hub")
        assert subjects.different_weights(stock.state_dict(), expected) == []


def test_a_hub_folder_whose_names_are_not_those_of_parameters():
    expected = subjects.mixtral().to(torch.bfloat16).state_dict()
    empty = subjects.mixtral().to(torch.bfloat16)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    folder = HERE / "hub" / "mixtral"
    found = on_two_ranks(empty, lambda model: load_pretrained(model, folder))
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    assert "block_sparse_moe" in str(list(load_file(folder / "model.safetensors")))


@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_an_adapter_folder(axes):
    import peft

    folder = HERE / "checkpoints" / "adapters" / "adapter"
    expected = {name: value for name, value in expected_of("adapters")["tensors"].items() if "lora_" in name}
    model = subjects.llama(**CASES["adapters"].fields)
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2)) if axes else models[rank]
        adapted = peft.PeftModel.from_pretrained(model, folder)
        if not axes:
            return adapted.state_dict()
        ids, _ = subjects.rows([1])
        adapted(input_ids=ids)  # adapters are sharded before the next forward
        return full_state_dict(adapted)

    found = run_ranks(len(models), body)[0]
    found = {name: value for name, value in found.items() if "lora_" in name}
    assert subjects.different_weights(found, expected) == [] and found


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", subjects.PLANS)
def test_a_plan_puts_every_parameter_where_it_did(name):
    expected = json.loads((HERE / "plans" / "expected.json").read_text())[name]
    found = run_ranks(2, lambda rank: subjects.parts(name, HERE / "plans"))
    assert json.loads(json.dumps(found)) == [expected] * 2


# -- files of runs ----------------------------------------------------------------------------------------------------


def test_the_file_of_a_run_says_what_it_said(monkeypatch):
    monkeypatch.chdir(HERE / "run")
    given = yaml.safe_load(Path("every-key.yaml").read_text())
    found = settings_of(Path("every-key.yaml"))
    given["mesh"] = {axis: int(size) for axis, size in (part.split("=") for part in given["mesh"].split(","))}
    for section, value in given.items():
        keys = value.items() if isinstance(value, dict) and section != "mesh" else [("", value)]
        for key, said in keys:
            name = f"{section}.{key}" if key else section
            assert found[name] == said, name


def test_the_defaults_of_a_run_are_what_they_were(monkeypatch):
    """Later versions may have more keys."""
    monkeypatch.chdir(HERE / "run")
    defaults, found = json.loads(Path("defaults.json").read_text()), settings_of(Path("minimal.yaml"))
    assert {name: found[name] for name in defaults} == defaults


@pytest.mark.processes
@pytest.mark.parametrize("mesh", ["dp=1", pytest.param("tp=2", marks=pytest.mark.sweep)])
def test_a_run_goes_on_where_it_was(mesh, tmp_path):
    folder = shutil.copytree(HERE / "run", tmp_path / "run")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if mesh == "dp=1":  # this process is the one rank: no launcher, which would import all of it once more
        variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        variables |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "parallelize", "run", "run.yaml", f"mesh={mesh}"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((folder / "expected.json").read_text())
    assert [line["step"] for line in found] == [2, 3]
    for line, before in zip(found, expected[2:], strict=True):
        assert line["lr"] == pytest.approx(before["lr"], rel=1e-12)
        for key in ("loss", "grad_norm"):  # to rounding: other hardware has other matmuls
            assert line[key] == pytest.approx(before[key], rel=1e-4)
