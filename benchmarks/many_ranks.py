"""What starting, meeting, saving and resuming cost a rank as there are more of them, without their machines.

    python -m benchmarks.many_ranks [--json benchmarks/results/many_ranks.json]

Llama 3 70B on pp=4,tp=8 and Qwen3 235B-A22B on pp=4,ep=8, each with dp for 32, 256 and 2,048 ranks, under ZeRO 3.

start   one process a rank, imports included: the model on meta, `parallelize_model` with PyTorch's fake process group.
        Collectives do nothing; a rank allocates its shards, without values.
meet    all ranks at one TCPStore with the facts that `start` compared, from the moment the last one is there until the
        last one has the verdict: one process for the store, one for the first rank, and eight for the others, in which
        each rank is a thread with its own connection.
save    the first rank: all reports, packed as they are sent, into the manifest. Each parameter and both moments are cut
        over the ranks of its stage.
resume  one rank: the manifest's bytes read, and what it reads for its slices of all tensors planned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write_record

STAGES = 4
MODELS = {"llama-3-70b": {"tp": 8}, "qwen3-235b-a22b": {"ep": 8}}
WORLDS = (32, 256, 2048)
CLIENTS = 8


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# -- start -------------------------------------------------------------------------------------------------------------


def start(model: str, world: int, rank: int, facts_file: str) -> dict[str, Any]:
    began = time.perf_counter()
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from parallelize import parallelize_model
    from parallelize.base.torch_private.torch_groups import fake_store
    from parallelize.comm import handshake
    from parallelize.plan.models.model_source import source_of

    compared: list[Any] = []
    handshake.compare_facts = lambda ranks, facts, *_: compared.append(facts)  # the fake backend compares none
    dist.init_process_group("fake", rank=rank, world_size=world, store=fake_store())
    options = dict(MODELS[model])
    tp = options.pop("tp", 1)
    axes = {"pp": STAGES, "dp": world // STAGES // tp, "tp": tp}
    parallelize_model(
        source_of(model).build("meta"),
        init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)),
        zero=3,
        dtype=torch.bfloat16,
        sequence_parallel=tp > 1,
        num_microbatches=2 * STAGES,
        initialize=lambda _: None,
        check_replicated=False,
        **options,
    )
    Path(facts_file).write_text(json.dumps(max(compared, key=len)))
    return {"start_s": time.perf_counter() - began, "start_gb": peak_gb(), "facts": len(max(compared, key=len))}


# -- meet --------------------------------------------------------------------------------------------------------------


def serve(world: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.readline()
    print(json.dumps({"store_gb": peak_gb(), "store_cpu_s": time.process_time()}))


def meet(port: int, world: int, first: int, count: int, facts_file: str) -> dict[str, Any]:
    """Ranks from `first` on: each a thread."""
    from datetime import timedelta

    import torch.distributed as dist

    from parallelize.comm.meeting import Meeting

    facts, ended, errors = json.loads(Path(facts_file).read_text()), [0.0] * count, []

    def body(index: int) -> None:
        try:
            store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300), wait_for_workers=False)
            store.add("there", 1)
            store.wait(["go"], timedelta(seconds=300))
            Meeting(store, tuple(range(world)), first + index, "start").compare(facts, 300.0)
            ended[index] = time.time()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    return {"ended": max(ended), "gb": peak_gb()}


def meeting(world: int, facts_file: str) -> dict[str, float]:
    from datetime import timedelta

    import torch.distributed as dist

    server = _process("serve", world)
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    each = -(-(world - 1) // CLIENTS)
    parts = [(0, 1), *((first, min(each, world - first)) for first in range(1, world, each))]
    clients = [_process("meet", port, world, first, count, facts_file) for first, count in parts]
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300), wait_for_workers=False)
    while store.add("there", 0) < world:
        time.sleep(0.1)
    began = time.time()
    store.set("go", "")
    results = [_result(client) for client in clients]
    served = _result(server, "\n")
    return {
        "meet_s": max(result["ended"] for result in results) - began,
        "first_rank_gb": results[0]["gb"],
        **served,
    }


# -- save and resume ---------------------------------------------------------------------------------------------------


def cut(shape: tuple[int, ...], ranks: int, index: int) -> list[list[int]] | None:
    """The box of one of `ranks`: of the first dim, and where that is short of the next one too; None where another rank
    writes the same."""
    box, left = [], ranks
    for length in shape:
        parts = math.gcd(left, length)
        index, place = divmod(index, parts)
        box.append([place * length // parts, (place + 1) * length // parts])
        left //= parts
    return None if index else box


def report(shapes: dict[str, tuple[int, ...]], stage_of: dict[str, int], world: int, rank: int) -> dict[str, Any]:
    """What a rank tells of its part of a save."""
    each = world // STAGES
    stage, index = divmod(rank, each)
    names = [name for name in shapes if stage_of[name] == stage]
    tables = {}
    for prefix, dtype in (("model/", "BF16"), ("optimizer/exp_avg/", "F32"), ("optimizer/exp_avg_sq/", "F32")):
        for name in names:
            key = prefix + name
            box = cut(shapes[name], each, index)
            if box is not None:
                tables[key] = (dtype, list(shapes[name]), [(key, box)], {})
    file = [f"rank-{rank:05d}.safetensors", 1 << 20, "0" * 64]
    return {"step": 1, "file": file, "tensors": tables, "state": {"optimizers": {}, "streams": None}}


def shapes_of(model: str) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    from parallelize.plan.models.model_source import source_of

    named = source_of(model).build("meta").named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    return shapes, {name: number * STAGES // len(shapes) for number, name in enumerate(shapes)}


def save(model: str, world: int, manifest_file: str) -> dict[str, Any]:
    from parallelize.checkpoint.run import rank_sync
    from parallelize.checkpoint.run.save import Reports, _manifest_text

    shapes, stage_of = shapes_of(model)
    messages = [rank_sync._packed(report(shapes, stage_of, world, rank)) for rank in range(world)]
    began = time.perf_counter()
    text = _manifest_text(1, Reports(range(world), rank_sync._Messages(messages)), {})
    assert isinstance(text, str), text
    took = time.perf_counter() - began
    Path(manifest_file).write_text(text)
    return {
        "message_kb": max(message.numel() for message in messages) / 1e3,
        "save_s": took,
        "save_gb": peak_gb(),
        "manifest_mb": len(text) / 1e6,
    }


def resume(model: str, world: int, manifest_file: str) -> dict[str, Any]:
    from parallelize.checkpoint.format.manifest import manifest_from
    from parallelize.checkpoint.format.saved_slices import overlapping_slices

    shapes, stage_of = shapes_of(model)
    began, before = time.perf_counter(), peak_gb()
    manifest = manifest_from(Path(manifest_file).read_bytes(), manifest_file)
    read, own = 0, report(shapes, stage_of, world // 2, 0)  # on half as many ranks
    for name, (_, _, [(_, box)], _) in own["tensors"].items():
        slices = overlapping_slices(manifest.tensors[name].slices, tuple(map(tuple, box)))
        read += sum(1 for _ in slices)
    return {"resume_s": time.perf_counter() - began, "resume_gb": peak_gb() - before, "reads": read}


# -- processes ---------------------------------------------------------------------------------------------------------


PARTS = {"start": start, "serve": serve, "meet": meet, "save": save, "resume": resume}


def _process(part: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.many_ranks", "--only", part, *map(str, arguments)]
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a thousand connections of a host without a name
    return subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str], text: str = "") -> dict[str, Any]:
    out, _ = process.communicate(text, timeout=600)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])


def measure(worlds: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for model in MODELS:
        for world in worlds:
            with tempfile.TemporaryDirectory() as folder:
                facts, manifest = f"{folder}/facts.json", f"{folder}/manifest.json"
                row = {"model": model, "ranks": world} | _result(_process("start", model, world, world - 1, facts))
                row |= meeting(world, facts)
                row |= _result(_process("save", model, world, manifest))
                row |= _result(_process("resume", model, world, manifest))
            rows.append(row)
            shown = (f"{key} {value:.3g}" for key, value in row.items() if key not in ("model", "ranks"))
            print(f"{model} on {world:,} ranks: {', '.join(shown)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="32 and 256 ranks alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        part, *arguments = options.only
        result = PARTS[part](*(int(text) if text.isdigit() else text for text in arguments))  # type: ignore[operator]
        if result is not None:
            print(json.dumps(result))
        return
    write_record(options.json, measure(WORLDS[:2] if options.small else WORLDS))


if __name__ == "__main__":
    main()
