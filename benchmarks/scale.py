"""What this package's own work costs as models and meshes grow: deciding, applying, explaining, and the manifest of a
checkpoint.

    python -m benchmarks.scale [--rounds 3] [--plot docs/images/scale.svg]

Models are on meta, without values; collectives do nothing (PyTorch's fake process group), so that a figure is the time
of one rank's own work. Each size runs in a process of its own. First `parallelize_model` of Llama 3.1 405B over 16,384
ranks, imports and the model's construction included; then Llama 3 8B of four depths on 128 ranks, and of 32 layers on
four meshes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import svg
from benchmarks.record import write_record

LARGEST = ("llama-3.1-405b", 126, "pp=16,dp=128,tp=8")
DEPTHS = tuple(("llama-3-8b", layers, "dp=16,tp=8") for layers in (16, 32, 64, 128))
MESHES = tuple(("llama-3-8b", 32, f"dp={dp},tp=8") for dp in (2, 16, 128, 2048))
PARTS = ("resolve", "apply", "explain", "manifest")


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def parts(model: str, layers: int, mesh: str) -> dict[str, float]:
    """Seconds of each part of one rank's work, and the size of the manifest."""
    from parallelize.base.mesh import MeshSpec
    from parallelize.checkpoint.run.save import Reports, _merged
    from parallelize.plan.choose import plan_or_none
    from parallelize.plan.model_facts import describe
    from parallelize.plan.models.model_source import source_of
    from parallelize.plan.options import Options
    from parallelize.plan.resolve import resolve
    from parallelize.tools.analysis.explain import explain

    source = source_of(model, {"num_hidden_layers": layers})
    spec = MeshSpec.parse(mesh)
    module = source.build("meta")
    plan, facts = plan_or_none(module, None), describe(module)
    resolve(plan, facts, spec, Options(zero=3))
    resolved = seconds_of(lambda: resolve(plan, facts, spec, Options(zero=3)))
    text: list[bytes] = []
    by_rank = reports_of(module, spec)
    reports = Reports(list(by_rank), list(by_rank.values()))
    manifest = seconds_of(lambda: text.append(_merged(reports).manifest(0, {}).to_bytes()))
    explained = seconds_of(lambda: explain(source, None, mesh, batch=4, sequence=4096, zero=3))
    applied = seconds_of(lambda: apply(source.build("meta"), spec))
    return {
        "resolve": resolved,
        "apply": applied,
        "explain": explained,
        "manifest": manifest,
        "manifest_mb": len(text[0]) / 1e6,
    }


def apply(module: Any, spec: Any) -> None:
    """`parallelize_model` under ZeRO 3, of which a rank allocates its shards alone, without values."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from parallelize import parallelize_model
    from parallelize.base.torch_private.torch_groups import fake_store

    dist.init_process_group("fake", rank=0, world_size=spec.world_size, store=fake_store())
    mesh = init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    microbatches = 2 * dict(spec.axes).get("pp", 1)
    parallelize_model(
        module,
        mesh,
        zero=3,
        dtype=torch.bfloat16,
        sequence_parallel=True,
        num_microbatches=microbatches,
        initialize=lambda _: None,
        check_replicated=False,
    )
    dist.destroy_process_group()


def reports_of(module: Any, spec: Any) -> dict[int, Any]:
    """What the ranks of a save send to the first one, for parameters that are cut along their first dim over all
    ranks."""
    ranks, state = spec.world_size, {"optimizers": {}, "streams": None}
    reports: dict[int, Any] = {}
    for rank in range(ranks):
        table = {}
        for name, parameter in module.named_parameters():
            rows = -(-parameter.shape[0] // ranks)
            start, stop = min(rank * rows, parameter.shape[0]), min((rank + 1) * rows, parameter.shape[0])
            if stop > start:
                box = [[start, stop], *([0, size] for size in parameter.shape[1:])]
                table[name] = ("float32", list(parameter.shape), [(name, box)], {})
        file = [f"rank{rank}.safetensors", 1, "0" * 64]
        reports[rank] = {"step": 0, "file": file, "tensors": table, "state": state}
    return reports


def largest() -> dict[str, float]:
    """Seconds from the start of the process, and its peak memory."""
    began = time.perf_counter()
    from parallelize.base.mesh import MeshSpec
    from parallelize.plan.models.model_source import source_of

    model, _, mesh = LARGEST
    apply(source_of(model).build("meta"), MeshSpec.parse(mesh))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"total_s": time.perf_counter() - began, "peak_gb": peak_kib * 1024 / 1e9}


def in_a_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def measure(rounds: int, small: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"405b": medians([in_a_process("--only", "largest") for _ in range(rounds)])}
    print(
        f"{LARGEST[0]} over {LARGEST[2]}: {result['405b']['total_s']:.1f} s, {result['405b']['peak_gb']:.2f} GB",
        flush=True,
    )
    for title, sizes in (("layers", DEPTHS), ("ranks", MESHES)):
        rows = []
        for index, (model, layers, mesh) in enumerate(sizes[:2] if small else sizes):
            row = medians([in_a_process("--only", f"{title}:{index}") for _ in range(rounds)])
            rows.append({"model": model, "layers": layers, "mesh": mesh} | row)
            shown = ", ".join(f"{part} {row[part]:.2f} s" for part in PARTS)
            print(f"{layers} layers on {mesh}: {shown}, {row['manifest_mb']:.1f} MB", flush=True)
        result[title] = rows
    return result


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Seconds of each part over the number of layers."""
    series = {part: [(row["layers"], row[part]) for row in rows] for part in PARTS}
    svg.points(path, "One rank's own work, Llama 3 8B of n layers on 128 ranks", "layers", "seconds", series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="of each kind the two smaller sizes alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of seconds over layers")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only == "largest":
        print(json.dumps(largest()))
        return
    if options.only:
        title, _, index = options.only.partition(":")
        print(json.dumps(parts(*{"layers": DEPTHS, "ranks": MESHES}[title][int(index)])))
        return
    result = measure(options.rounds, options.small)
    write_record(options.json, result)
    if options.plot:
        draw(options.plot, result["layers"])


if __name__ == "__main__":
    main()
