"""Writes what `test_written_before.py` reads, with the version of `parallelize` that is installed where it runs.

    cd /tmp && PYTHON_OF_THAT_VERSION REPOSITORY/tests/checkpoint/written_before/make.py FOLDER [PART...]

What is committed was written at 61880bf. It is never written again: another version's files are added beside it, in a folder of
their own. Ranks are processes, as in a real run, so only public names are used. Each run is also read back by the version that
wrote it, alone on one rank, and compared with the tensors of the ranks that saved it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subjects
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from subjects import CASES, STEPS, VALUES, Case

import parallelize
from parallelize import Checkpointer, build_mesh, destroy_groups, parallelize_model, save_adapter, save_pretrained


def main(target: Path, chosen: list[str]) -> None:
    print("written by", parallelize.__file__)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], None]] = {
        name: partial(write_checkpoint, target / "checkpoints" / name, name, case) for name, case in CASES.items()
    }
    parts |= {
        "hub": partial(write_hub_of_experts, target / "hub"),
        "plans": partial(write_plans, target / "plans"),
        "run": partial(write_run, target / "run"),
    }
    for name in chosen or parts:
        print(name, flush=True)
        parts[name]()
    for path in target.rglob(".lock"):
        path.unlink()


# -- ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(world_size: int, body: Callable[[int], Any], folder: Path) -> list[Any]:
    """Results of a function on ranks that are processes, as JSON. They are forked, so they import nothing again."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    mp.start_processes(_rank, (world_size, body, folder, store), world_size, start_method="fork")
    store.unlink(missing_ok=True)
    results = []
    for rank in range(world_size):
        path = folder / f"result-{rank}.json"
        results.append(json.loads(path.read_text()))
        path.unlink()
    return results


def _rank(rank: int, world_size: int, body: Callable[[int], Any], folder: Path, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        (folder / f"result-{rank}.json").write_text(json.dumps(body(rank)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    destroy_groups()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n")


# -- checkpoints, and folders of their models -------------------------------------------------------------------------


def write_checkpoint(folder: Path, name: str, case: Case) -> None:
    shutil.rmtree(folder, ignore_errors=True)

    def train(rank: int) -> dict[str, Any]:
        objects = case.on(case.model(), case.axes, case.options)
        losses = [objects.step() for _ in range(STEPS)]
        with Checkpointer(folder / "run", objects.parallel, **objects.saved, **case.saving) as checkpoints:
            checkpoints.save(STEPS, VALUES)
        if name == "adamw":
            save_pretrained(objects.parallel, folder / "hub", max_shard_size=4000)
        if name == "adapters":
            save_adapter(objects.parallel, folder / "adapter")
            if rank == 0:
                (folder / "adapter" / "README.md").unlink()  # 5 KB of PEFT's headings
        state = {"position": subjects.position(objects), "streams": subjects.stream_digests(objects)}
        state["generators"] = subjects.generator_draws() if prod(case.axes.values()) == 1 else None
        live = [
            subjects.digest(x)
            for _, weight, each in subjects.stepped(objects.optimizer)
            for x in (weight, *each.values())
        ]
        return {
            **state,
            "live": live,
            "losses": losses,
            "next_loss": objects.step().hex(),
            "next_samples": objects.taken,
        }

    def read(rank: int) -> list[Any]:
        objects = case.on(case.model(), {"dp": 1}, {})
        with Checkpointer(folder / "run", objects.parallel, **objects.saved, **options_of_reader(case)) as checkpoints:
            assert checkpoints.resume() == STEPS
        digests = subjects.expected_digests(objects)
        return [digests, subjects.differences(objects, digests)]

    ranks = run_ranks(prod(case.axes.values()), train, folder)
    ((digests, wrong),) = run_ranks(1, read, folder)
    assert not wrong, wrong
    position = ranks[0]["position"]
    for rank in ranks:
        assert set(rank.pop("live")) <= set(digests.values()), "what was read is what the ranks had when they saved it"
        assert rank.pop("position") == position
    write_json(folder / "expected.json", {"step": STEPS, "position": position, "ranks": ranks, "tensors": digests})


def options_of_reader(case: Case) -> dict[str, Any]:
    return {key: value for key, value in case.saving.items() if key != "asynchronous"}


def write_hub_of_experts(folder: Path) -> None:
    """A folder whose tensors have other names and shapes than the model's parameters."""
    shutil.rmtree(folder, ignore_errors=True)

    def write(rank: int) -> None:
        parallel = parallelize_model(subjects.mixtral(), build_mesh("cpu", tp=2))
        save_pretrained(parallel, folder / "mixtral", dtype=torch.bfloat16)

    run_ranks(2, write, folder)


# -- plans ------------------------------------------------------------------------------------------------------------


def write_plans(folder: Path) -> None:
    """The parts of each parameter by each plan of the folder, of which `own.yaml` was written by hand."""
    for name in subjects.SHIPPED:
        shutil.copy(parallelize.shipped_plans()[name], folder / f"{name}.yaml")
    parts = run_ranks(2, lambda rank: {name: subjects.parts(name, folder) for name in subjects.PLANS}, folder)
    write_json(folder / "expected.json", parts[0])


# -- a run ------------------------------------------------------------------------------------------------------------


def write_run(folder: Path) -> None:
    """`run.yaml` as a command, to its end: the losses of all steps, and the checkpoint in the middle."""
    for name in ("saved", "saved-watch", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "parallelize", "run", "run.yaml"]
    subprocess.run(command, cwd=folder, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_json(folder / "expected.json", [{k: line[k] for k in ("step", "loss", "lr", "grad_norm")} for line in lines])
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(folder / "saved" / "step-00000004")
    (folder / "saved" / "latest").write_text((folder / "saved" / "latest").read_text().replace("4", "2"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
